"""Two models on the same input: what runs them, what records them, and how they differ."""

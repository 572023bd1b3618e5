"""Golden hashes: `cases` in reproducible arithmetic, every way of running them, and hashes of a user's own call."""

"""What was found, as text and as JSON."""

"""What was found, as text, as JSON, and as one page of HTML."""

"""The requests that a benchmark sends, and when."""

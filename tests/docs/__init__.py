"""Pages against the code."""

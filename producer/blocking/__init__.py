"""The client for code that blocks."""

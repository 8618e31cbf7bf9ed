"""The wire schema, and its page."""

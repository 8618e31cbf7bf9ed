"""Promises of a whole engine: the tokens, whatever else it does."""

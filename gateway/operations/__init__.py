"""Operators' routes: the API of the page at `/operations`. Only API keys made for it are accepted."""

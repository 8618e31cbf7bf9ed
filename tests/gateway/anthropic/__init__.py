"""Anthropic's API, with its official client."""

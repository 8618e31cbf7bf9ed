"""Anthropic's API of messages."""

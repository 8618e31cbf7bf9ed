"""Grammars and schemas."""

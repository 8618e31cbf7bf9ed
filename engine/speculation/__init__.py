"""Guesses at the next tokens, verified several at once: the same tokens in fewer steps (docs/speculation.md)."""

"""Reads `config.json` as transformers writes it."""

"""Families of models, and what their layers compute."""

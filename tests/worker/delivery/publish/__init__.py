"""Tokens become entries of reply streams."""

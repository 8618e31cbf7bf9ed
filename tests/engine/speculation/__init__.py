"""Drafts, and how many of them are tried."""

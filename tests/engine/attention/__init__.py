"""Attention of every implementation against one reference."""

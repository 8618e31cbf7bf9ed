"""Replies: read over one connection, and put together from their entries."""

"""Sends requests of any API to the queue, and replies to their callers."""

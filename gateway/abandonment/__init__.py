"""Requests that nobody waits for any more end, whichever gateway their clients came through."""

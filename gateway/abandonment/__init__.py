"""Ends requests that nobody waits for any more, whichever gateway their clients used."""

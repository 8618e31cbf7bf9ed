"""Entries of the queue become requests of the engine."""

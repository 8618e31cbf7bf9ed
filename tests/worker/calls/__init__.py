"""Calls that a worker answers beside requests."""

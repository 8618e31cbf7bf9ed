"""Requests while they run."""

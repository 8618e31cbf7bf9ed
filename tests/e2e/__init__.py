"""Clients, Redis and workers together."""

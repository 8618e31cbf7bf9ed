"""Clients as they are installed, against a gateway."""

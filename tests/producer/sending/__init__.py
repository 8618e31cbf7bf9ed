"""Requests as callers send them."""

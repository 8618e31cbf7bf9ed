"""Admission between an HTTP request and its handler, and between a handler and the queue: keys and their limits."""

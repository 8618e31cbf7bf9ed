"""Servers of Redis for tests, their clocks, and proxies that make trouble in front of them."""

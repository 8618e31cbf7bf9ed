"""The gateway's own keys in Redis."""

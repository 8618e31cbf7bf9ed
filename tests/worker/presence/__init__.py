"""A worker's name and heartbeat."""

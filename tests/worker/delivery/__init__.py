"""The way of a request through a worker."""

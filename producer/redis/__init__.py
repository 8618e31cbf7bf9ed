"""Access to Redis, shared by the client and the worker."""

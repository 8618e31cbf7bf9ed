"""Access to Redis, shared by all sides: addresses, clients, pipelines, and which faults may pass."""

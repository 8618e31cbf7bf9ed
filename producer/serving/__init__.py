"""State of the connection to Redis, shared by the two servers: worker and gateway."""

"""HTTP in general: bodies, errors, event streams, clients that leave."""

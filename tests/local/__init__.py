"""Running everything on one machine: the embedded server, and models without a queue."""

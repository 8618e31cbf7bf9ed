"""What the worker's port and the gateway share."""

"""A worker's name and heartbeat: how others see that it lives."""

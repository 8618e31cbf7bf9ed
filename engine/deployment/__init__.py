"""What a checkpoint becomes on these devices: backends, memory, and the sizes of the cache."""

"""What clients do to a queue: they add requests and calls, cancel them, and ask how it is."""

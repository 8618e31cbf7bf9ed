"""Calls: questions about prompts that a worker answers beside generation, whether or not it has free capacity."""

"""Calls: questions about prompts that a worker answers while it generates, whether or not it has free capacity."""

"""Calls: what a worker answers about prompts, beside what it generates and whether or not it has capacity for more."""

"""Checkpoints in Hugging Face format: read from files that may hold anything, straight to their devices."""

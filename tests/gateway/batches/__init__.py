"""Batches, and the files that they read and write."""

"""Checkpoints of every form, whole and damaged."""

"""tools/plan: what a model takes of a TPU slice, and how fast it will be."""

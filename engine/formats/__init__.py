"""Quantized weights: the forms in which they are held, and how the formats of checkpoints are converted to those."""

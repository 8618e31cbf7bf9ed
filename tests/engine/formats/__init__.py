"""Quantized weights as they are stored."""

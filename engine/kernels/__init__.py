"""Compiled code of our own that layers call, by device. Attention's kernels are with their backends, in `attention`."""

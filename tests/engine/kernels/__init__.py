"""Kernels for TPUs and CPUs, against XLA."""

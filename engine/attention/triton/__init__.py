"""Ragged paged attention for NVIDIA GPUs: Pallas kernels that Triton compiles."""

from __future__ import annotations

from penstock.engine.attention.triton.backend import TritonAttention

__all__ = ["TritonAttention"]

"""Kernels for TPUs in Pallas: matmuls with quantized weights, which read codes and scales from HBM as they are held."""

from __future__ import annotations

from penstock.engine.kernels.form import KernelForm
from penstock.engine.kernels.quantized_matmul import quantized_matmul

__all__ = ["KernelForm", "quantized_matmul"]

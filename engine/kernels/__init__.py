"""Kernels for TPUs in Pallas: matmuls with quantized weights, which read codes and scales from HBM as they are held."""

from __future__ import annotations

from penstock.engine.kernels.form import LANES, KernelForm
from penstock.engine.kernels.grouped_matmul import GROUPED_QUANTIZED_MATMUL, grouped_quantized_matmul
from penstock.engine.kernels.quantized_matmul import quantized_matmul

__all__ = ["GROUPED_QUANTIZED_MATMUL", "LANES", "KernelForm", "grouped_quantized_matmul", "quantized_matmul"]

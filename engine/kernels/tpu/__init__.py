"""Pallas kernels for TPUs: matmuls with quantized weights, which read codes and scales from HBM as they are held, and
the gated delta rule, which reads and writes a state once.
"""

from __future__ import annotations

from penstock.engine.kernels.tpu.delta_rule import (
    GATED_DELTA_RULE,
    MOST_STATE_BYTES,
    DeltaTokens,
    DeltaWeights,
    TokenSlots,
    gated_delta_rule,
)
from penstock.engine.kernels.tpu.form import LANES, KernelForm
from penstock.engine.kernels.tpu.grouped_matmul import GROUPED_QUANTIZED_MATMUL, grouped_quantized_matmul
from penstock.engine.kernels.tpu.quantized_matmul import quantized_matmul

__all__ = [
    "GATED_DELTA_RULE",
    "GROUPED_QUANTIZED_MATMUL",
    "LANES",
    "MOST_STATE_BYTES",
    "DeltaTokens",
    "DeltaWeights",
    "KernelForm",
    "TokenSlots",
    "gated_delta_rule",
    "grouped_quantized_matmul",
    "quantized_matmul",
]

"""Kernels for CPUs in C++, built by the machine's own compiler when they are first used.

Nothing needs a compiler to install or to run: where there is none, XLA does the work.
"""

from penstock.engine.native.library import (
    ATTENTION,
    ATTENTION_INT8,
    GROUP_ROWS,
    GROUPED_MATMUL,
    HALVES,
    MATMUL,
    QUANTIZED_MATMUL,
    ROUTE,
    SUM_ROWS,
    SURVEY,
    NativeLibrary,
    NativeUnavailableError,
    load_library,
    panel_width,
    value_or_empty,
)

__all__ = [
    "ATTENTION",
    "ATTENTION_INT8",
    "GROUPED_MATMUL",
    "GROUP_ROWS",
    "HALVES",
    "MATMUL",
    "QUANTIZED_MATMUL",
    "ROUTE",
    "SUM_ROWS",
    "SURVEY",
    "NativeLibrary",
    "NativeUnavailableError",
    "load_library",
    "panel_width",
    "value_or_empty",
]

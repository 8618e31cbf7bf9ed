"""C++ kernels for CPUs: shipped with an image, or built by the machine's own compiler on first use.

Nothing needs a compiler to install or to run: without one, and without shipped kernels, XLA does the work.
"""

from penstock.engine.kernels.cpu.compilation import NativeUnavailableError, find_compiler
from penstock.engine.kernels.cpu.layout import (
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
)
from penstock.engine.kernels.cpu.library import (
    NativeLibrary,
    is_ready,
    load_library,
    pack_panels,
    panel_width,
    value_or_empty,
)
from penstock.engine.kernels.cpu.processor_kinds import kind_here
from penstock.engine.kernels.cpu.shipping import shipped_library

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
    "find_compiler",
    "is_ready",
    "kind_here",
    "load_library",
    "pack_panels",
    "panel_width",
    "shipped_library",
    "value_or_empty",
]

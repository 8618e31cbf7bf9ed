"""What Pallas kernels for TPU and for GPU share."""

from __future__ import annotations

from typing import Any, TypeAlias

Ref: TypeAlias = Any
"""A block of memory that a kernel reads or writes; JAX names no type for it."""

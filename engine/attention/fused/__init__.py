"""Our own TPU kernel: writes a step's keys and values into the pages and attends over them, in one pass."""

from __future__ import annotations

from penstock.engine.attention.fused.backend import FusedAttention

__all__ = ["FusedAttention"]

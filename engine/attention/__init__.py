"""Paged attention behind one contract, with an implementation per platform."""

from __future__ import annotations

from engine.attention.contract import AttentionBackend, KVCacheSpec, RaggedBatch
from engine.attention.xla import XlaAttention

__all__ = ["AttentionBackend", "KVCacheSpec", "RaggedBatch", "XlaAttention"]

"""Paged attention behind one contract, with an implementation per platform."""

from __future__ import annotations

from engine.attention.choice import ATTENTION_CHOICES, attention_for, check_page_table, page_size_for
from engine.attention.contract import AttentionBackend, CacheArray, KVCacheSpec, RaggedBatch
from engine.attention.sharded import ShardedAttention
from engine.attention.xla import XlaAttention

__all__ = [
    "ATTENTION_CHOICES",
    "AttentionBackend",
    "CacheArray",
    "KVCacheSpec",
    "RaggedBatch",
    "ShardedAttention",
    "XlaAttention",
    "attention_for",
    "check_page_table",
    "page_size_for",
]

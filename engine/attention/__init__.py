"""Paged attention behind one contract, with an implementation per platform."""

from __future__ import annotations

from penstock.engine.attention.contract import AttentionBackend, CacheArray, CacheSpec, KVCacheSpec
from penstock.engine.attention.grouped import GroupedBatch, attend_in_groups
from penstock.engine.attention.quantization import kv_head_bytes
from penstock.engine.attention.selection import attention_for, check_page_table, page_size_for
from penstock.engine.attention.sharded import ShardedAttention
from penstock.engine.attention.xla import XlaAttention
from penstock.engine.models.attention_interface import RaggedBatch

__all__ = [
    "AttentionBackend",
    "CacheArray",
    "CacheSpec",
    "GroupedBatch",
    "KVCacheSpec",
    "RaggedBatch",
    "ShardedAttention",
    "XlaAttention",
    "attend_in_groups",
    "attention_for",
    "check_page_table",
    "kv_head_bytes",
    "page_size_for",
]

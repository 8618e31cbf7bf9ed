"""Attention for groups of layers, each with pages of its own (`engine/models/layer_groups.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from penstock.engine.attention.contract import AttentionBackend, Prepared
from penstock.engine.attention.native import NativeAttention
from penstock.engine.models.attention_interface import (
    QKV,
    Attend,
    AttentionOptions,
    GroupCache,
    KVScales,
    NativeAttend,
    RaggedBatch,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class GroupedBatch:
    """A RaggedBatch for each group. If a group has a window, its table has page 0 for pages behind the window."""

    slots: tuple[jax.Array, ...]  # for each group, i32 [num_tokens]
    kv_lens: jax.Array  # i32 [max_seqs]
    page_indices: tuple[jax.Array, ...]  # for each group, i32 [max_seqs, pages_per_seq]
    cu_q_lens: jax.Array  # i32 [max_seqs + 1]
    num_seqs: jax.Array  # i32 [1]

    def of(self, group: int) -> RaggedBatch:
        return RaggedBatch(self.slots[group], self.kv_lens, self.page_indices[group], self.cu_q_lens, self.num_seqs)


def attend_in_groups(attention: AttentionBackend, batch: GroupedBatch, page_size: int) -> Attend:
    """Returns the decoder's Attend: `attention`, with what it prepares from the tables of each layer's group."""
    return (_NativeGroups if isinstance(attention, NativeAttention) else _Groups)(attention, batch, page_size)


class _Groups:
    def __init__(self, attention: AttentionBackend, batch: GroupedBatch, page_size: int) -> None:
        self._attention, self._batch = attention, batch
        self._prepared = [attention.prepare(batch.of(group), page_size) for group in range(len(batch.slots))]
        # For loops over layers of several groups; if there are none, the compiler drops it.
        self._stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *self._prepared)

    def __call__(
        self,
        qkv: QKV,
        cache: GroupCache,
        *,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
        kv_scales: KVScales | None = None,
    ) -> tuple[jax.Array, GroupCache]:
        prepared = self.batch_of(cache.group)
        attended, pages = self._attention(qkv, cache.pages, prepared, options=options, sinks=sinks, kv_scales=kv_scales)
        return attended, cache._replace(pages=pages)

    def batch_of(self, group: int | jax.Array) -> Prepared:
        if isinstance(group, int):
            return self._prepared[group]
        return jax.tree.map(lambda array: array[group], self._stacked)


class _NativeGroups(_Groups, NativeAttend):
    """Attention by groups for the C++ kernel, which has nothing to prepare."""

    @property
    def num_tokens(self) -> jax.Array:
        return self._batch.cu_q_lens[self._batch.num_seqs]

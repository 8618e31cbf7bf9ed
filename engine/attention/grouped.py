"""Attention for layers in groups, each of which has pages of its own (`engine/models/layer_groups.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from penstock.engine.attention.contract import AttentionBackend
from penstock.engine.attention.native import NativeAttention
from penstock.engine.models.attend import QKV, Attend, AttentionOptions, GroupCache, NativeAttend, RaggedBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class GroupedBatch:
    """A RaggedBatch for each group. Of a group with a window, the table has page 0 where the window has passed."""

    slots: tuple[jax.Array, ...]  # of each group i32 [num_tokens]
    kv_lens: jax.Array  # i32 [max_seqs]
    page_indices: tuple[jax.Array, ...]  # of each group i32 [max_seqs, pages_per_seq]
    cu_q_lens: jax.Array  # i32 [max_seqs + 1]
    num_seqs: jax.Array  # i32 [1]

    def of(self, group: int | jax.Array) -> RaggedBatch:
        if isinstance(group, int):
            slots, page_indices = self.slots[group], self.page_indices[group]
        else:
            slots, page_indices = jnp.stack(self.slots)[group], jnp.stack(self.page_indices)[group]
        return RaggedBatch(slots, self.kv_lens, page_indices, self.cu_q_lens, self.num_seqs)


def attend_in_groups(attention: AttentionBackend, batch: GroupedBatch) -> Attend:
    """What a decoder is given: `attention`, with the tables of each layer's group."""
    return (_NativeGroups if isinstance(attention, NativeAttention) else _Groups)(attention, batch)


class _Groups:
    def __init__(self, attention: AttentionBackend, batch: GroupedBatch) -> None:
        self._attention, self._batch = attention, batch

    def __call__(
        self, qkv: QKV, cache: GroupCache, *, options: AttentionOptions, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, GroupCache]:
        attended, pages = self._attention(qkv, cache.pages, self.batch_of(cache.group), options=options, sinks=sinks)
        return attended, cache._replace(pages=pages)

    def batch_of(self, group: int | jax.Array) -> RaggedBatch:
        return self._batch.of(group)


class _NativeGroups(_Groups, NativeAttend):
    """Of the C++ kernel."""

    @property
    def num_tokens(self) -> jax.Array:
        return self._batch.cu_q_lens[self._batch.num_seqs]

"""What an attention implementation is given and owes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax

from engine.models.decoder import LayerCache


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The size of a KV cache; how it is laid out is the implementation's own."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def bytes_per_page(self) -> int:
        """Keys and values in all layers together, without what a layout may pad."""
        itemsize = jax.numpy.dtype(self.dtype).itemsize
        return 2 * self.num_layers * self.page_size * self.num_kv_heads * self.head_dim * itemsize


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Which token belongs to which sequence and page: the metadata of the ragged paged attention kernel in JAX.

    Sequence i owns the tokens `[cu_q_lens[i], cu_q_lens[i + 1])`; they are the last ones of its `kv_lens[i]`. Only the
    first `num_seqs` sequences are real, and each of those has at least one token; tokens behind theirs are padding.
    """

    slots: jax.Array  # i32 [num_tokens]: page * page_size + place in the page; padding tokens point into page 0
    kv_lens: jax.Array  # i32 [max_seqs]
    page_indices: jax.Array  # i32 [max_seqs, pages_per_seq]
    cu_q_lens: jax.Array  # i32 [max_seqs + 1]
    num_seqs: jax.Array  # i32 [1]


class AttentionBackend(Protocol):
    """Writes a step's keys and values into the pages and attends over everything its sequences hold."""

    def cache_dtype(self, dtype: str) -> str:
        """The type that keys and values of a model of type `dtype` are kept in."""

    def init_cache(self, spec: KVCacheSpec) -> tuple[LayerCache, ...]:
        """An empty cache, one pytree per layer, to be passed in, donated and returned by every step."""

    def __call__(
        self,
        q: jax.Array,  # [num_tokens, num_heads, head_dim]
        k: jax.Array,  # [num_tokens, num_kv_heads, head_dim]
        v: jax.Array,  # [num_tokens, num_kv_heads, head_dim]
        cache: LayerCache,
        batch: RaggedBatch,
        *,
        sliding_window: int | None = None,
        scale: float | None = None,  # None: head_dim ** -0.5
    ) -> tuple[jax.Array, LayerCache]:
        """Returns the attended values, shaped as `q`, and the layer's new cache.

        A token attends to itself and to everything before it in its sequence, or to the last `sliding_window` tokens of
        that. Rows of padding tokens hold anything. A NaN in `k` spoils the later rows of its own sequence; none
        may outlive its sequence in the pages in such a way that it spoils the next holder's rows.
        """

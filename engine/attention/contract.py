"""What an attention implementation is given and owes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from penstock.engine.attention.quantization import is_quantized
from penstock.engine.models.attend import QKV, AttentionOptions, KVScales, LayerCache, RaggedBatch
from penstock.engine.models.axes import Axes

PLAIN = AttentionOptions()

Prepared = Any
"""A step as an implementation wants it: a pytree that only the implementation looks into."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """How many pages of one kind there are, and what they hold; how it is laid out is the implementation's own."""

    num_layers: int  # that a page holds: one array for each, which groups of layers share
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What an engine keeps of its sequences: pages of each kind, and slots for states."""

    kinds: tuple[KVCacheSpec, ...]
    num_states: int = 0  # slot 0 included; 0 where no layer keeps any

    @property
    def page_size(self) -> int:
        return self.kinds[0].page_size

    @property
    def counts(self) -> tuple[int, ...]:
        """Pages of each kind, page 0 included."""
        return tuple(kind.num_pages for kind in self.kinds)

    @property
    def num_pages(self) -> int:
        """Of all kinds together, each with a page 0."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class CacheArray:
    """One array of a KV cache. Its logical axes name the one that tensor parallelism splits `kv_heads`."""

    shape: tuple[int, ...]
    dtype: str
    axes: Axes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(jnp.dtype(self.dtype).itemsize)


def transposed_keys(spec: KVCacheSpec) -> tuple[tuple[CacheArray, ...], ...]:
    """By array, keys `[pages, num_kv_heads, head_dim, page_size]` and values with the last two transposed, and scales
    if they have any.
    """
    k_shape = (spec.num_pages, spec.num_kv_heads, spec.head_dim, spec.page_size)
    v_shape = (spec.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
    keys, values = (CacheArray(shape, spec.dtype, (None, "kv_heads", None, None)) for shape in (k_shape, v_shape))
    return ((keys, values, *scale_arrays(spec)),) * spec.num_layers


def scale_arrays(spec: KVCacheSpec) -> tuple[CacheArray, ...]:
    """Beside codes of 8 bits: a scale for each token's keys, and one for its values, by KV head."""
    if not is_quantized(spec.dtype):
        return ()
    shape = (spec.num_pages, spec.num_kv_heads, spec.page_size)
    return (CacheArray(shape, "float32", (None, "kv_heads", None)),) * 2


def first_key(position: int, window: int | None) -> int:
    """The first token that one at `position` sees."""
    return 0 if window is None else max(0, position + 1 - window)


class AttentionBackend(Protocol):
    """Writes a step's keys and values into the pages and attends over everything its sequences hold."""

    name: str
    """As the setting `attention` calls it."""

    is_stacked: bool
    """Whether it keeps the pages of all layers in one pytree, for a stacked decoder, or one per layer."""

    quantized_dtypes: tuple[str, ...]
    """Types of 8 bits that it can keep pages in."""

    def cache_dtype(self, dtype: str) -> str:
        """The type that keys and values of a model of type `dtype` are kept in."""

    def cache_arrays(self, spec: KVCacheSpec) -> tuple[Any, ...]:
        """The pytrees of CacheArray that make pages of this kind: one for each layer of a page, or a single one."""

    def rows_moved(
        self, context: int, spec: KVCacheSpec, pages_per_seq: int, window: int | None = None
    ) -> tuple[int, int]:
        """Rows of pages read from and written to memory, in a layer with that window, for one token that decodes behind
        `context` others.
        """
        del pages_per_seq
        pages = -(-(context + 1) // spec.page_size) - first_key(context, window) // spec.page_size
        return pages * spec.page_size, 1

    def init_cache(self, spec: KVCacheSpec) -> tuple[LayerCache, ...]:
        """An empty cache, to be passed in, donated and returned by every step."""
        arrays = self.cache_arrays(spec)
        cache: tuple[LayerCache, ...] = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), arrays)
        return cache

    def prepare(self, batch: RaggedBatch, page_size: int) -> Prepared:
        """What it reads of a step and what is the same in all layers of a group: made once, outside any loop over them.

        `page_size` is that of the cache's pages. By default the batch itself.
        """
        del page_size
        return batch

    def __call__(
        self,
        qkv: QKV,
        cache: LayerCache,
        prepared: Prepared,
        *,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,  # [num_heads], as of Attend
        kv_scales: KVScales | None = None,  # for pages of fp8 alone
    ) -> tuple[jax.Array, LayerCache]:
        """Returns the attended values, shaped as the queries, and the layer's new cache; `prepared` is of `prepare`.

        Without keys and values the pages are read alone: an earlier layer of the step has written this one's there.
        A token attends to itself and to everything before it in its sequence, as far as `options` let it see: pages
        that lie wholly behind a window may be others' by now, and what is read of them must not show. Rows of
        padding tokens hold anything. A NaN among the keys spoils the later rows of its own sequence; none may outlive
        its sequence in the pages in such a way that it spoils the next holder's rows.
        """

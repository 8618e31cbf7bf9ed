"""The contract of attention implementations: what they are given, and what they return."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from penstock.engine.attention.quantization import is_quantized
from penstock.engine.models.attention_interface import QKV, AttentionOptions, KVScales, LayerCache, RaggedBatch
from penstock.engine.models.axes import Axes

PLAIN = AttentionOptions()

Prepared = Any
"""A step in the form that an implementation needs: a pytree that only the implementation looks into."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Number and contents of the pages of one kind; their layout is up to the implementation."""

    num_layers: int  # arrays in a page, one for each layer of a group
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What an engine keeps of its sequences: pages of each kind, and state slots."""

    kinds: tuple[KVCacheSpec, ...]
    num_states: int = 0  # slot 0 included; 0 if no layer keeps states

    @property
    def page_size(self) -> int:
        return self.kinds[0].page_size

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of pages of each kind, page 0 included."""
        return tuple(kind.num_pages for kind in self.kinds)

    @property
    def num_pages(self) -> int:
        """Number of pages of all kinds together, each with a page 0."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class CacheArray:
    """One array of a KV cache. Its logical axis `kv_heads` is the one that tensor parallelism splits."""

    shape: tuple[int, ...]
    dtype: str
    axes: Axes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(jnp.dtype(self.dtype).itemsize)


def transposed_keys(spec: KVCacheSpec) -> tuple[tuple[CacheArray, ...], ...]:
    """Returns, for each layer array, keys `[pages, num_kv_heads, head_dim, page_size]`, values with the last two axes
    swapped, and scales if there are any.
    """
    k_shape = (spec.num_pages, spec.num_kv_heads, spec.head_dim, spec.page_size)
    v_shape = (spec.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
    keys, values = (CacheArray(shape, spec.dtype, (None, "kv_heads", None, None)) for shape in (k_shape, v_shape))
    return ((keys, values, *scale_arrays(spec)),) * spec.num_layers


def scale_arrays(spec: KVCacheSpec) -> tuple[CacheArray, ...]:
    """Returns the arrays beside 8-bit codes: a scale per token and KV head for keys, and one for values."""
    if not is_quantized(spec.dtype):
        return ()
    shape = (spec.num_pages, spec.num_kv_heads, spec.page_size)
    return (CacheArray(shape, "float32", (None, "kv_heads", None)),) * 2


def first_key(position: int, window: int | None) -> int:
    """Returns the first position that a token at `position` sees."""
    return 0 if window is None else max(0, position + 1 - window)


class AttentionBackend(Protocol):
    """Writes a step's keys and values into the pages, and attends over everything that its sequences hold."""

    name: str
    """The implementation's name in the setting `attention`."""

    is_stacked: bool
    """Whether the pages of all layers are one pytree, for a stacked decoder, or there is one per layer."""

    quantized_dtypes: tuple[str, ...]
    """The 8-bit types that pages can have."""

    def cache_dtype(self, dtype: str) -> str:
        """Returns the type in which the keys and values of a model of type `dtype` are kept."""

    def cache_arrays(self, spec: KVCacheSpec) -> tuple[Any, ...]:
        """Returns the pytrees of CacheArray that make up pages of this kind: one for each layer of a page, or a single
        one.
        """

    def rows_moved(
        self, context: int, spec: KVCacheSpec, pages_per_seq: int, window: int | None = None
    ) -> tuple[int, int]:
        """Returns the number of page rows read from and written to memory, in a layer with that window, for one token
        that decodes after `context` others.
        """
        del pages_per_seq
        pages = -(-(context + 1) // spec.page_size) - first_key(context, window) // spec.page_size
        return pages * spec.page_size, 1

    def init_cache(self, spec: KVCacheSpec) -> tuple[LayerCache, ...]:
        """Returns an empty cache. Every step takes the cache as a donated argument, and returns the new one."""
        arrays = self.cache_arrays(spec)
        cache: tuple[LayerCache, ...] = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), arrays)
        return cache

    def prepare(self, batch: RaggedBatch, page_size: int) -> Prepared:
        """Prepares what is the same in all layers of a group: done once, outside any loop over layers.

        `page_size` is that of the cache's pages. The default returns the batch itself.
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
        sinks: jax.Array | None = None,  # [num_heads], as in Attend
        kv_scales: KVScales | None = None,  # only for pages of fp8
    ) -> tuple[jax.Array, LayerCache]:
        """Returns the attended values, shaped like the queries, and the layer's new cache; `prepared` comes from
        `prepare`.

        Without keys and values the pages are only read: an earlier layer of the step has written this layer's to them.
        A token attends to itself and to everything before it in its sequence that `options` let it see. Pages wholly
        behind a window may belong to other sequences by now, and their contents must not affect the result. Rows of
        padding tokens are undefined. A NaN among the keys spoils later rows of its own sequence. What a sequence leaves
        in its pages, a NaN too, must not spoil rows of the sequence that gets the pages next.
        """

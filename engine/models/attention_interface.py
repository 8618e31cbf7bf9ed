"""The interface between models/ and attention/: what a model hands to attention, and what it gets back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

LayerCache = Any
"""One array of the KV cache: a pytree that only the attention implementation looks into."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StackedCache:
    """The LayerCache of a stacked decoder: one array for all layers, which no layer may copy."""

    pages: LayerCache  # arrays [arrays * num_pages, ...]
    first_page: jax.Array  # i32: index of the first page of this layer's array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The metadata of a step: which token belongs to which sequence and page, as for JAX's ragged paged attention
    kernel.

    Sequence i owns the tokens `[cu_q_lens[i], cu_q_lens[i + 1])`, which are the last ones of its `kv_lens[i]`. Only the
    first `num_seqs` sequences are real, and each of them has at least one token; the tokens after theirs are padding. A
    sequence whose tokens point into page 0 has ended: nothing of it may be written to its pages.
    """

    slots: jax.Array  # i32 [num_tokens]: page * page_size + place in the page; padding tokens point into page 0
    kv_lens: jax.Array  # i32 [max_seqs]
    page_indices: jax.Array  # i32 [max_seqs, pages_per_seq]
    cu_q_lens: jax.Array  # i32 [max_seqs + 1]
    num_seqs: jax.Array  # i32 [1]


class GroupCache(NamedTuple):
    """A layer's share of the KV cache: an array of pages. The table of the layer's group lists the pages that belong to
    it.
    """

    pages: LayerCache
    group: int | jax.Array


class QKV(NamedTuple):
    """Queries, keys and values of this step's tokens. Keys and values are None when an earlier layer of the step has
    already written them to the pages.
    """

    q: jax.Array  # [num_tokens, num_heads, head_dim]
    k: jax.Array | None  # [num_tokens, num_kv_heads, head_dim]
    v: jax.Array | None  # [num_tokens, num_kv_heads, head_dim]


KV_SCALES_DTYPE = "float8_e4m3fn"


class KVScales(NamedTuple):
    """The divisors of a layer's keys and values in pages of KV_SCALES_DTYPE, if the checkpoint has any."""

    keys: jax.Array  # f32 [num_kv_heads]
    values: jax.Array  # f32 [num_kv_heads]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How queries and keys become attention weights. Static: steps are compiled for these values."""

    sliding_window: int | None = None  # number of last tokens that a token sees, itself included; None: all before it
    scale: float | None = None  # of scores; None: head_dim ** -0.5
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)

    def scale_for(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale


class Attend(Protocol):
    """Computes attention of this step's tokens over everything that their sequences hold, these tokens included.

    Writes keys and values into `cache` if it is given any. Returns the attended values, shaped like the queries, and
    the new cache. `sinks` are the scores, already scaled, of one more key that each query of a head sees and that has
    no value. `kv_scales` are only for pages of fp8; without them each token has a scale of its own, as in int8.
    """

    def __call__(
        self,
        qkv: QKV,
        cache: GroupCache,
        *,
        options: AttentionOptions,
        sinks: jax.Array | None = None,  # [num_heads]
        kv_scales: KVScales | None = None,
    ) -> tuple[jax.Array, GroupCache]: ...


class NativeAttend(ABC):
    """The Attend of the C++ kernel. It exposes the step's tables, so that a block can make attention a part of its own
    kernel call.
    """

    @abstractmethod
    def __call__(
        self,
        qkv: QKV,
        cache: GroupCache,
        *,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
        kv_scales: KVScales | None = None,
    ) -> tuple[jax.Array, GroupCache]: ...

    @property
    @abstractmethod
    def num_tokens(self) -> jax.Array:
        """Number of the step's tokens without padding, i32 [1]."""

    @abstractmethod
    def batch_of(self, group: int | jax.Array) -> RaggedBatch:
        """Returns the step's metadata for the layers of a group."""

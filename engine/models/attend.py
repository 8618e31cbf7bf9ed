"""What a model hands to attention, and what it gets back: the border between models/ and attention/."""

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
    """The LayerCache of a stacked decoder: all of them in one, which no layer may copy."""

    pages: LayerCache  # of arrays [arrays * num_pages, ...]
    first_page: jax.Array  # i32: where the pages of this layer's array begin


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Which token belongs to which sequence and page: the metadata of the ragged paged attention kernel in JAX.

    Sequence i owns the tokens `[cu_q_lens[i], cu_q_lens[i + 1])`; they are the last ones of its `kv_lens[i]`. Only the
    first `num_seqs` sequences are real, and each of those has at least one token; tokens behind theirs are padding.
    A sequence whose tokens point into page 0 is over: nothing of it may be written to its pages.
    """

    slots: jax.Array  # i32 [num_tokens]: page * page_size + place in the page; padding tokens point into page 0
    kv_lens: jax.Array  # i32 [max_seqs]
    page_indices: jax.Array  # i32 [max_seqs, pages_per_seq]
    cu_q_lens: jax.Array  # i32 [max_seqs + 1]
    num_seqs: jax.Array  # i32 [1]


class GroupCache(NamedTuple):
    """A layer's share of the KV cache: an array of pages, of which those in the table of its group are its own."""

    pages: LayerCache
    group: int | jax.Array


class QKV(NamedTuple):
    """Queries, keys and values of this step's tokens. Without keys and values: those are in the pages already, as an
    earlier layer of the step has written them.
    """

    q: jax.Array  # [num_tokens, num_heads, head_dim]
    k: jax.Array | None  # [num_tokens, num_kv_heads, head_dim]
    v: jax.Array | None  # [num_tokens, num_kv_heads, head_dim]


KV_SCALES_DTYPE = "float8_e4m3fn"


class KVScales(NamedTuple):
    """What a layer's keys and values are divided by in pages of KV_SCALES_DTYPE, where a checkpoint says so."""

    keys: jax.Array  # f32 [num_kv_heads]
    values: jax.Array  # f32 [num_kv_heads]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How queries and keys become weights. Static: steps are compiled for these values."""

    sliding_window: int | None = None  # a token sees itself and the others of the last so many; None: all before it
    scale: float | None = None  # of scores; None: head_dim ** -0.5
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)

    def scale_for(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale


class Attend(Protocol):
    """Attention of this step's tokens over everything their sequences hold, themselves included.

    Writes keys and values into `cache`, where it is given any. Returns the attended values, shaped as the queries, and
    the new cache.
    `sinks` are the scores, already scaled, of one more key that each query of a head sees and that has no value.
    `kv_scales` are for pages of fp8 alone; without them each token has its own, as in int8.
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
    """The Attend of the C++ kernel, which a block can also call as a part of its own kernel, with the tables."""

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
        """Of the step, i32 [1], without padding."""

    @abstractmethod
    def batch_of(self, group: int | jax.Array) -> RaggedBatch:
        """The step as layers of a group have it."""

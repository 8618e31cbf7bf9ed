"""What a model hands to attention, and what it gets back: the border between models/ and attention/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

LayerCache = Any
"""One layer's share of the KV cache: a pytree that only the attention implementation looks into."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StackedCache:
    """The LayerCache of a stacked decoder: the pages of all layers in one array, which no layer may copy."""

    pages: jax.Array  # [num_layers * num_pages, ...]
    first_page: jax.Array  # i32: where this layer's pages begin


class QKV(NamedTuple):
    """Queries, keys and values of this step's tokens."""

    q: jax.Array  # [num_tokens, num_heads, head_dim]
    k: jax.Array  # [num_tokens, num_kv_heads, head_dim]
    v: jax.Array  # [num_tokens, num_kv_heads, head_dim]


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

    Writes keys and values into `cache`. Returns the attended values, shaped as the queries, and the new cache.
    `sinks` are the scores, already scaled, of one more key that each query of a head sees and that has no value.
    """

    def __call__(
        self,
        qkv: QKV,
        cache: LayerCache,
        *,
        options: AttentionOptions,
        sinks: jax.Array | None = None,  # [num_heads]
    ) -> tuple[jax.Array, LayerCache]: ...

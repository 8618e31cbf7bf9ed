"""Attention as blocks have it: projections, norms of queries and keys, rotary positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.models.attend import QKV, Attend, AttentionOptions, LayerCache
from penstock.engine.models.config import AttentionConfig, RopeConfig
from penstock.engine.models.layers import Linear, norm_of
from penstock.engine.models.rope import rotate

Rotary: TypeAlias = tuple[jax.Array, jax.Array]
"""Cosines and sines of the step's positions, each f32 `[num_tokens, rope.dim // 2]`."""


class StepInputs(NamedTuple):
    """What all layers of a step are given beside their tokens."""

    rotary: Mapping[RopeConfig, Rotary]  # of every rope that the model has
    attend: Attend
    is_real: jax.Array | None = None  # bool [num_tokens]: which are not padding; None: all


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al., arXiv 2305.13245), with query and key norms where a family has them."""

    def __init__(self, config: AttentionConfig, hidden_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = Linear(hidden_size, q_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.k = Linear(hidden_size, kv_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.v = Linear(hidden_size, kv_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.out = Linear(q_size, hidden_size, bias=config.out_bias, dtype=dtype, rngs=rngs)
        self.q_norm = None if config.qk_norm is None else norm_of(config.qk_norm, config.head_dim, dtype)
        self.k_norm = None if config.qk_norm is None else norm_of(config.qk_norm, config.head_dim, dtype)
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,), dtype)) if config.sinks else None
        self.config = config

    def __call__(
        self,
        x: jax.Array,  # [num_tokens, hidden]
        step: StepInputs,
        cache: LayerCache,
    ) -> tuple[jax.Array, LayerCache]:
        num_tokens, config = x.shape[0], self.config
        q, k, v = (part.reshape(num_tokens, -1, config.head_dim) for part in self.project(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        rotary = step.rotary[config.rope]
        qkv = QKV(rotate(q, *rotary), rotate(k, *rotary), v)
        sinks = None if self.sinks is None else self.sinks[...]
        attended, cache = step.attend(qkv, cache, options=AttentionOptions(config.sliding_window), sinks=sinks)
        return self.out(attended.reshape(num_tokens, -1)), cache

    def project(self, x: jax.Array) -> Sequence[jax.Array]:
        """Queries, keys and values, each `[num_tokens, heads * head_dim]`."""
        return self.q(x), self.k(x), self.v(x)

"""Attention as blocks have it: projections, norms of queries and keys, rotary positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.models.attend import QKV, Attend, AttentionOptions, GroupCache, KVScales
from penstock.engine.models.config import AttentionConfig, RopeConfig
from penstock.engine.models.layers import Linear, norm_of
from penstock.engine.models.recurrence import StateBatch
from penstock.engine.models.rope import Rotary, query_scales, rotate


class SumParts(Protocol):
    """A matmul that ends in a sum over devices, in parts of what it gives."""

    def __call__(self, x: jax.Array, kernels: tuple[jax.Array, ...], *, ends_layer: bool) -> tuple[jax.Array, ...]:
        """`x @ kernel`, `[num_tokens, out]`, with the kernel in one part or two: of two, the sum of the first travels
        while the second is multiplied, and that of the second while what follows begins, if it does not end the layer.
        """


class StepInputs(NamedTuple):
    """What all layers of a step are given beside their tokens."""

    positions: jax.Array  # i32 [num_tokens]
    rotary: Mapping[RopeConfig, Rotary]  # of every rope that the model has
    attend: Attend
    is_real: jax.Array | None = None  # bool [num_tokens]: which are not padding; None: all
    num_rows: jax.Array | None = None  # i32 [1]: of those whose end is wanted, behind the last attention; None: all
    layer: jax.Array | None = None  # i32 []: which of the layers whose experts a block holds; None: it holds its own
    states: StateBatch | None = None  # which are read and written; None: the model keeps none
    sum_parts: SumParts | None = None  # of the matmuls that end in a sum over devices; None: they are not in parts


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al., arXiv 2305.13245), with query and key norms where a family has them."""

    def __init__(self, config: AttentionConfig, hidden_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = Linear(hidden_size, q_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.k = Linear(hidden_size, kv_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.v = Linear(hidden_size, kv_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        gate = Linear(hidden_size, q_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs) if config.has_gate else None
        self.gate = gate
        self.out = Linear(q_size, hidden_size, bias=config.out_bias, dtype=dtype, rngs=rngs)
        self.q_norm = None if config.qk_norm is None else norm_of(config.qk_norm, config.head_dim, dtype)
        self.k_norm = None if config.qk_norm is None else norm_of(config.qk_norm, config.head_dim, dtype)
        whole = config.qk_projection_norm
        self.q_projection_norm = None if whole is None else norm_of(whole, q_size, dtype)
        self.k_projection_norm = None if whole is None else norm_of(whole, kv_size, dtype)
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,), dtype)) if config.sinks else None
        self.k_scale, self.v_scale = (
            nnx.Param(jnp.ones((config.num_kv_heads,), jnp.float32)) if config.has_kv_scales else None for _ in "kv"
        )
        self.config = config

    def __call__(
        self,
        x: jax.Array,  # [num_tokens, hidden]
        step: StepInputs,
        cache: GroupCache,
    ) -> tuple[jax.Array, GroupCache]:
        attended, cache = self.attended(self.project(x), step, cache)
        return self.out(attended), cache

    def project(self, x: jax.Array) -> Sequence[jax.Array]:
        """Queries, keys and values, and the gate where there is one, each `[num_tokens, heads * head_dim]`."""
        return [linear(x) for linear in self.inputs]

    @property
    def inputs(self) -> tuple[Linear, ...]:
        """The matmuls of what it is given."""
        of_all = (self.q, self.k, self.v)
        return of_all if self.gate is None else (*of_all, self.gate)

    def attended(
        self, projected: Sequence[jax.Array], step: StepInputs, cache: GroupCache
    ) -> tuple[jax.Array, GroupCache]:
        """What is between the matmuls: `[num_tokens, heads * head_dim]`, of what `project` gives."""
        (q, k, v, *gates), config = projected, self.config
        num_tokens = q.shape[0]
        if self.q_projection_norm is not None and self.k_projection_norm is not None:
            q, k = self.q_projection_norm(q), self.k_projection_norm(k)
        q, k, v = (part.reshape(num_tokens, -1, config.head_dim) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if config.rope is not None:
            turn = partial(rotate, tables=step.rotary[config.rope], interleaved=config.rope.interleaved)
            q, k = turn(q), turn(k)
        if config.query_scale is not None:
            q = q * query_scales(step.positions, config.query_scale).astype(q.dtype)[:, None, None]
        options = AttentionOptions(config.sliding_window, config.scale, config.soft_cap)
        sinks = None if self.sinks is None else self.sinks[...]
        attended, cache = step.attend(QKV(q, k, v), cache, options=options, sinks=sinks, kv_scales=self._kv_scales)
        attended = attended.reshape(num_tokens, -1)
        for gate in gates:
            attended = attended * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(attended.dtype)
        return attended, cache

    @property
    def _kv_scales(self) -> KVScales | None:
        if self.k_scale is None or self.v_scale is None:
            return None
        return KVScales(self.k_scale[...], self.v_scale[...])

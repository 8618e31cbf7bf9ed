"""Attention inside a block: projections, norms of queries and keys, rotary positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.models.attention_interface import QKV, Attend, AttentionOptions, GroupCache, KVScales
from penstock.engine.models.config import AttentionConfig, RopeConfig
from penstock.engine.models.layers.basic import Norm, norm_of, normed
from penstock.engine.models.layers.linear import Linear, present, project
from penstock.engine.models.layers.recurrence import StateBatch
from penstock.engine.models.layers.rope import Rotary, query_scales, rotate


class SumParts(Protocol):
    """A matmul that ends in a sum over devices, with its result in parts."""

    def __call__(self, x: jax.Array, kernels: tuple[jax.Array, ...], *, ends_layer: bool) -> tuple[jax.Array, ...]:
        """Returns `x @ kernel`, `[num_tokens, out]`, with the kernel in one or two parts. With two, the sum of the
        first travels while the second is multiplied. The sum of the second travels while the next matmuls begin, unless
        it ends the layer.
        """


class LayerInputs(NamedTuple):
    """The inputs that all layers of a step get besides their tokens."""

    positions: jax.Array  # i32 [num_tokens]
    rotary: Mapping[RopeConfig, Rotary]  # for every rope of the model
    attend: Attend
    is_real: jax.Array | None = None  # bool [num_tokens]: which tokens are not padding; None: all
    num_rows: jax.Array | None = None  # i32 [1]: rows that are wanted after the last attention; None: all
    layer: jax.Array | None = None  # i32 []: the layer, where a block holds all layers' experts; None: only its own
    states: StateBatch | None = None  # the states that are read and written; None: the model keeps none
    sum_parts: SumParts | None = None  # for matmuls that end in a sum over devices; None: not in parts
    per_layer: jax.Array | None = None  # [num_tokens, size]: each token's vector for this layer; None: layers have none


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al., arXiv 2305.13245), with query and key norms if a family has them."""

    def __init__(self, config: AttentionConfig, hidden_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = Linear.plain(hidden_size, q_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        k, v, gate = (
            Linear.plain(hidden_size, size, bias=config.qkv_bias, dtype=dtype, rngs=rngs) if exists else None
            for size, exists in (
                (kv_size, config.has_kv),
                (kv_size, config.has_kv and config.has_v),
                (q_size, config.has_gate),
            )
        )
        self.k, self.v, self.gate = k, v, gate
        self.out = Linear.plain(q_size, hidden_size, bias=config.out_bias, dtype=dtype, rngs=rngs)
        of_kv = (config.qk_norm, config.v_norm) if config.has_kv else (None, None)
        self.q_norm, self.k_norm, self.v_norm = (
            None if norm is None else norm_of(norm, config.head_dim, dtype) for norm in (config.qk_norm, *of_kv)
        )
        whole = config.qk_projection_norm
        self.q_projection_norm, self.k_projection_norm = (
            None if whole is None or not size else norm_of(whole, size, dtype)
            for size in (q_size, kv_size if config.has_kv else 0)
        )
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,), dtype)) if config.sinks else None
        self.k_scale, self.v_scale = (
            nnx.Param(jnp.ones((config.num_kv_heads,), jnp.float32)) if config.has_kv_scales else None for _ in "kv"
        )
        self.config = config

    def __call__(
        self,
        x: jax.Array,  # [num_tokens, hidden]
        step: LayerInputs,
        cache: GroupCache,
    ) -> tuple[jax.Array, GroupCache]:
        attended, cache = self.attended(self.project(x), step, cache)
        return self.out(attended), cache

    def project(self, x: jax.Array) -> Sequence[jax.Array]:
        """Returns the results of the matmuls in `inputs`, each `[num_tokens, heads * head_dim]`."""
        return project(x, self.inputs)

    @property
    def inputs(self) -> tuple[Linear, ...]:
        """The input matmuls: queries, then keys, values and the gate, where they exist."""
        return present(self.q, self.k, self.v, self.gate)

    def attended(
        self, projected: Sequence[jax.Array], step: LayerInputs, cache: GroupCache
    ) -> tuple[jax.Array, GroupCache]:
        """Computes what lies between the matmuls: takes the results of `project`, returns `[num_tokens, heads *
        head_dim]`.
        """
        config, parts = self.config, list(projected)
        gate = parts.pop() if config.has_gate else None
        options = AttentionOptions(config.sliding_window, config.scale, config.soft_cap)
        sinks = None if self.sinks is None else self.sinks[...]
        qkv = QKV(self._queries(parts.pop(0), step), *(self._keys_and_values(parts, step) if parts else (None, None)))
        attended, cache = step.attend(qkv, cache, options=options, sinks=sinks, kv_scales=self._kv_scales)
        attended = attended.reshape(attended.shape[0], -1)
        if gate is not None:
            attended = attended * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(attended.dtype)
        return attended, cache

    def _queries(self, q: jax.Array, step: LayerInputs) -> jax.Array:  # [num_tokens, num_heads, head_dim]
        q = self._turned(q, (self.q_projection_norm, self.q_norm), step)
        if self.config.query_scale is None:
            return q
        return q * query_scales(step.positions, self.config.query_scale).astype(q.dtype)[:, None, None]

    def _keys_and_values(self, parts: Sequence[jax.Array], step: LayerInputs) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values, each `[num_tokens, num_kv_heads, head_dim]`. `parts` are the results of both
        matmuls, or of the one for keys, which then gives the values too.
        """
        values = parts[-1].reshape(parts[-1].shape[0], -1, self.config.head_dim)
        return self._turned(parts[0], (self.k_projection_norm, self.k_norm), step), normed(self.v_norm, values)

    def _turned(self, x: jax.Array, norms: tuple[Norm | None, Norm | None], step: LayerInputs) -> jax.Array:
        """Norms `x`, all heads together or each by itself, and rotates it."""
        rope, (of_all, of_head) = self.config.rope, norms
        x = normed(of_head, normed(of_all, x).reshape(x.shape[0], -1, self.config.head_dim))
        return x if rope is None else rotate(x, step.rotary[rope], interleaved=rope.interleaved)

    @property
    def _kv_scales(self) -> KVScales | None:
        if self.k_scale is None or self.v_scale is None:
            return None
        return KVScales(self.k_scale[...], self.v_scale[...])

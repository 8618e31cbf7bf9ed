"""One layer of a decoder, built from its BlockConfig."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.models.attention_interface import GroupCache
from penstock.engine.models.config import (
    AttentionConfig,
    BlockConfig,
    DeltaNetConfig,
    ExpertsConfig,
    NormConfig,
    PerLayerConfig,
    Recurrence,
)
from penstock.engine.models.layers.attention import Attention, LayerInputs
from penstock.engine.models.layers.basic import ACTIVATIONS, GatedMLP, Norm, RMSNorm, norm_of, normed, scaled
from penstock.engine.models.layers.delta_net import DeltaNet
from penstock.engine.models.layers.experts import Experts
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.layers.quantized import quantize_modules
from penstock.engine.models.layers.recurrence import StateCache
from penstock.engine.models.layers.short_conv import ShortConv

Cache = TypeVar("Cache", GroupCache, StateCache)
"""A block's view of its sequences' past: pages, or states."""


class PerLayer(nnx.Module):
    """A layer's use of its per-token vector: a gate from the residual stream times the vector, a matmul and a norm."""

    def __init__(
        self, config: PerLayerConfig, norm: NormConfig, hidden: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.gate = Linear.plain(hidden, config.size, bias=False, dtype=dtype, rngs=rngs)
        self.projection = Linear.plain(config.size, hidden, bias=False, dtype=dtype, rngs=rngs)
        self.norm = norm_of(norm, hidden, dtype)
        self.activation = config.activation

    def __call__(self, x: jax.Array, vectors: jax.Array) -> jax.Array:  # [num_tokens, hidden], [num_tokens, size]
        return self.norm(self.projection(ACTIVATIONS[self.activation](self.gate(x)) * vectors))


class Block(nnx.Module):
    """Attention and feed-forward, one after the other or in parallel, with a residual connection around each. A
    recurrence that keeps states may take the place of attention.
    """

    attention: Attention
    """Set only if the block has attention; `recurrence` is then None."""

    def __init__(self, config: BlockConfig, hidden_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        def norm(*, exists: bool) -> Norm | None:
            return norm_of(config.norm, hidden_size, dtype) if exists else None

        before, after = config.norm_placement != "after", config.norm_placement != "before"
        self.attention_norm = norm(exists=before)
        mixer = config.mixer
        if isinstance(mixer, AttentionConfig):
            self.attention = Attention(mixer, hidden_size, dtype=dtype, rngs=rngs)
        self.recurrence = None if isinstance(mixer, AttentionConfig) else _recurrence(mixer, hidden_size, dtype, rngs)
        self.attention_out_norm = norm(exists=after)
        self.mlp_norm = norm(exists=before and not config.parallel)
        self.mlp = (
            Experts(config.mlp, hidden_size, dtype=dtype, rngs=rngs)
            if isinstance(config.mlp, ExpertsConfig)
            else GatedMLP(config.mlp, hidden_size, dtype=dtype, rngs=rngs)
        )
        self.mlp_out_norm = norm(exists=after)
        per_layer = config.per_layer
        self.per_layer = (
            None if per_layer is None else PerLayer(per_layer, config.norm, hidden_size, dtype=dtype, rngs=rngs)
        )
        self.scalar = nnx.Param(jnp.ones((1,), dtype)) if config.has_scalar else None
        self.config, self.is_parallel, self.residual_scale = config, config.parallel, config.residual_scale
        quantize_modules(self, config.packed)

    def __call__(self, x: jax.Array, step: LayerInputs, cache: Cache) -> tuple[jax.Array, Cache]:
        attended, cache = self.attend(x, step, cache)
        return self.feed_forward(attended, x, step), cache

    def attend(
        self, x: jax.Array, step: LayerInputs, cache: Cache, squares: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        """Computes the first half: adds attention, or the recurrence, to `x`. `squares` is the sum of the squares of
        `x`, if the caller has it.
        """
        norm = self.attention_norm
        read = norm(x, squares) if isinstance(norm, RMSNorm) else normed(norm, x)
        if isinstance(cache, StateCache):
            if self.recurrence is None:
                raise TypeError("a block with attention has pages")
            attended, cache = self.recurrence(read, step, cache)
        else:
            attended, cache = self.attention(read, step, cache)
        return x + scaled(normed(self.attention_out_norm, attended), self.residual_scale), cache

    def feed_forward(self, x: jax.Array, before: jax.Array, step: LayerInputs) -> jax.Array:
        """Computes the second half: adds the feed-forward to `x`, then applies what the block ends with. `before` is
        the input of the block.
        """
        read = normed(self.attention_norm, before) if self.is_parallel else normed(self.mlp_norm, x)
        y = self.mlp(read, step.is_real, step.layer, x) if isinstance(self.mlp, Experts) else self.mlp(read)
        return self.ended(x + scaled(normed(self.mlp_out_norm, y), self.residual_scale), step)

    def ended(self, x: jax.Array, step: LayerInputs) -> jax.Array:
        """Applies what comes after the feed-forward, and returns the block's result."""
        if self.per_layer is not None and step.per_layer is not None:
            x = x + self.per_layer(x, step.per_layer)
        return x if self.scalar is None else x * self.scalar[...]


def _recurrence(config: Recurrence, hidden_size: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> ShortConv | DeltaNet:
    if isinstance(config, DeltaNetConfig):
        return DeltaNet(config, hidden_size, dtype=dtype, rngs=rngs)
    return ShortConv(config, hidden_size, dtype=dtype, rngs=rngs)

"""One layer of a decoder, put together as its BlockConfig states it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.models.attend import LayerCache
from penstock.engine.models.attention import Attention, StepInputs
from penstock.engine.models.config import BlockConfig
from penstock.engine.models.layers import GatedMLP, norm_of, scaled


class Block(nnx.Module):
    """Attention and feed-forward, one after the other or both at once, and a residual connection around each."""

    def __init__(self, config: BlockConfig, hidden_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.attention_norm = norm_of(config.norm, hidden_size, dtype)
        self.attention = Attention(config.attention, hidden_size, dtype=dtype, rngs=rngs)
        self.mlp_norm = None if config.parallel else norm_of(config.norm, hidden_size, dtype)
        self.mlp = GatedMLP(config.mlp, hidden_size, dtype=dtype, rngs=rngs)
        self.residual_scale = config.residual_scale

    def __call__(self, x: jax.Array, step: StepInputs, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        normed = self.attention_norm(x)
        attended, cache = self.attention(normed, step, cache)
        x = x + scaled(attended, self.residual_scale)
        if self.mlp_norm is not None:
            normed = self.mlp_norm(x)
        return x + scaled(self.mlp(normed), self.residual_scale), cache

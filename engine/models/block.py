"""One layer of a decoder, put together as its BlockConfig states it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.models.attend import LayerCache
from penstock.engine.models.attention import Attention, StepInputs
from penstock.engine.models.config import BlockConfig, ExpertsConfig
from penstock.engine.models.experts import Experts
from penstock.engine.models.layers import GatedMLP, norm_of


class Block(nnx.Module):
    """Attention and feed-forward, each around a residual connection."""

    def __init__(self, config: BlockConfig, hidden_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.attention_norm = norm_of(config.norm, hidden_size, dtype)
        self.attention = Attention(config.attention, hidden_size, dtype=dtype, rngs=rngs)
        self.mlp_norm = norm_of(config.norm, hidden_size, dtype)
        self.mlp = (
            Experts(config.mlp, hidden_size, dtype=dtype, rngs=rngs)
            if isinstance(config.mlp, ExpertsConfig)
            else GatedMLP(config.mlp, hidden_size, dtype=dtype, rngs=rngs)
        )

    def __call__(self, x: jax.Array, step: StepInputs, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        attended, cache = self.attention(self.attention_norm(x), step, cache)
        x = x + attended
        return x + self._feed_forward(self.mlp_norm(x), step), cache

    def _feed_forward(self, x: jax.Array, step: StepInputs) -> jax.Array:
        return self.mlp(x, step.is_real) if isinstance(self.mlp, Experts) else self.mlp(x)

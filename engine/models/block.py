"""One layer of a decoder, put together as its BlockConfig states it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.models.attend import LayerCache
from penstock.engine.models.attention import Attention, StepInputs
from penstock.engine.models.config import BlockConfig
from penstock.engine.models.layers import GatedMLP, RMSNorm, norm_of


class Block(nnx.Module):
    """Attention and feed-forward, each around a residual connection."""

    def __init__(self, config: BlockConfig, hidden_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        def norm(*placements: str) -> RMSNorm | None:
            return norm_of(config.norm, hidden_size, dtype) if config.norm_placement in placements else None

        self.attention_norm = norm("before", "around")
        self.attention = Attention(config.attention, hidden_size, dtype=dtype, rngs=rngs)
        self.attention_out_norm = norm("after", "around")
        self.mlp_norm = norm("before", "around")
        self.mlp = GatedMLP(config.mlp, hidden_size, dtype=dtype, rngs=rngs)
        self.mlp_out_norm = norm("after", "around")

    def __call__(self, x: jax.Array, step: StepInputs, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        attended, cache = self.attention(_normed(self.attention_norm, x), step, cache)
        x = x + _normed(self.attention_out_norm, attended)
        return x + _normed(self.mlp_out_norm, self.mlp(_normed(self.mlp_norm, x))), cache


def _normed(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)

"""One layer of a decoder, put together as its BlockConfig states it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.models.attend import GroupCache
from penstock.engine.models.attention import Attention, StepInputs
from penstock.engine.models.config import BlockConfig
from penstock.engine.models.layers import GatedMLP, Norm, norm_of, scaled


class Block(nnx.Module):
    """Attention and feed-forward, one after the other or both at once, and a residual connection around each."""

    def __init__(self, config: BlockConfig, hidden_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        def norm(*placements: str) -> Norm | None:
            return norm_of(config.norm, hidden_size, dtype) if config.norm_placement in placements else None

        self.attention_norm = norm("before", "around", "parallel")
        self.attention = Attention(config.attention, hidden_size, dtype=dtype, rngs=rngs)
        self.attention_out_norm = norm("after", "around")
        self.mlp_norm = norm("before", "around")
        self.mlp = GatedMLP(config.mlp, hidden_size, dtype=dtype, rngs=rngs)
        self.mlp_out_norm = norm("after", "around")
        self.config = config

    def __call__(self, x: jax.Array, step: StepInputs, cache: GroupCache) -> tuple[jax.Array, GroupCache]:
        config = self.config
        normed = _normed(self.attention_norm, x)
        attended, cache = self.attention(normed, step, cache)
        x = x + scaled(_normed(self.attention_out_norm, attended), config.residual_scale)
        if config.norm_placement != "parallel":
            normed = _normed(self.mlp_norm, x)
        return x + scaled(_normed(self.mlp_out_norm, self.mlp(normed)), config.residual_scale), cache


def _normed(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)

"""The layers that the families share. All of them work on a flat axis of tokens, `[num_tokens, ...]`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from penstock.engine.models.config import MLPConfig, NormConfig
from penstock.engine.models.layers.linear import Linear, present, project

# Keyed by the values of `hidden_act` in config.json.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis (Zhang and Sennrich, arXiv 1910.07467), computed in f32."""

    def __init__(self, config: NormConfig, size: int, *, dtype: jnp.dtype) -> None:
        weights = jnp.full((size,), 0 if config.unit_offset else 1, dtype)
        self.scale = nnx.Param(weights) if config.has_weights else None
        self.config = config

    def __call__(self, x: jax.Array, squares: jax.Array | None = None) -> jax.Array:
        """Norms `x`. `squares` is `sum_of_squares(x)`, if the caller has it."""
        squares = sum_of_squares(x) if squares is None else squares
        normed = x.astype(jnp.float32) * self.inverse(squares, x.shape[-1])
        if self.scale is None:
            return normed.astype(x.dtype)
        if not self.config.scales_in_f32:
            return normed.astype(x.dtype) * self.factors(x.dtype)
        return (normed * self.factors(normed.dtype)).astype(x.dtype)

    def inverse(self, squares: jax.Array, size: int) -> jax.Array:
        """Returns the norm's factor for a token: the inverse root of the mean of `size` squares, from their sum."""
        return jax.lax.rsqrt(squares / size + self.config.eps)

    def factors(self, dtype: DTypeLike, part: tuple[int, int] = (0, 1)) -> jax.Array:
        """Returns the factor of each feature, `[size]`. `part` is the number of a part of the features, and how many
        there are.
        """
        if self.scale is None:
            raise TypeError("a norm without weights has no factors")
        number, num_parts = part
        scale = self.scale[...] if num_parts == 1 else jnp.split(self.scale[...], num_parts)[number]
        scale = scale.astype(dtype)
        return 1 + scale if self.config.unit_offset else scale


class LayerNorm(nnx.Module):
    """Norm over the last axis without a bias (Ba et al., arXiv 1607.06450), computed in f32, its scale included."""

    def __init__(self, config: NormConfig, size: int, *, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = config.eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (normed * self.scale[...].astype(jnp.float32)).astype(x.dtype)


def sum_of_squares(x: jax.Array) -> jax.Array:  # -> f32 [..., 1]
    return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)


Norm: TypeAlias = RMSNorm | LayerNorm


def norm_of(config: NormConfig, size: int, dtype: jnp.dtype) -> Norm:
    return (LayerNorm if config.kind == "layer" else RMSNorm)(config, size, dtype=dtype)


def normed(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Returns `factor * x`, rounded once; a factor of 1 adds nothing to the program."""
    return x if factor == 1.0 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def soft_capped(x: jax.Array, cap: float | None) -> jax.Array:
    """Limits `x` to within `cap` of 0; values far below it are nearly unchanged."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class GatedMLP(nnx.Module):
    """Computes `down(act(gate(x)) * up(x))` (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: MLPConfig, hidden: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        intermediate, bias = config.intermediate_size, config.bias
        self.gate = Linear.plain(hidden, intermediate, bias=bias, dtype=dtype, rngs=rngs)
        self.up: Linear | None = Linear.plain(hidden, intermediate, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear.plain(intermediate, hidden, bias=bias, dtype=dtype, rngs=rngs)
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, *up = project(x, self.inputs)
        return self.down(ACTIVATIONS[self.activation](gate) * up[0] if up else gate)  # joined: their kernel has gated

    @property
    def inputs(self) -> tuple[Linear, ...]:
        return present(self.gate, self.up)

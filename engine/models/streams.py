"""The residual stream between the layers of a stacked decoder: whole, or in halves whose sums over devices travel while
others are computed.

Each half of a layer ends with a sum over devices, and what follows needs all of it: compiled as it is written, nothing
overlaps the links. In halves (after Wang et al., "Overlap Communication with Dependent Computation via Decomposition",
ASPLOS 2023, with two parts instead of one per device) the sum of the first half of the features travels while the
second half is multiplied; that of the second while the next matmuls, which sum over features, begin with the first. A
norm between them is one factor for a token, which those matmuls apply to what they have summed.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from penstock.engine.models.attend import GroupCache
from penstock.engine.models.attention import StepInputs, SumHalves
from penstock.engine.models.block import Block
from penstock.engine.models.config import BlockConfig, MLPConfig, ModelConfig
from penstock.engine.models.experts import Experts
from penstock.engine.models.layers import ACTIVATIONS, LayerNorm, Linear, RMSNorm, scaled, sum_of_squares

_LANES = 128
_T = TypeVar("_T")
_Pair = tuple[_T, _T]


class Whole(NamedTuple):
    """The sum of squares that the next layer begins with is computed on the way with the sum that a layer ends with:
    XLA expects it to take as long by itself.
    """

    x: jax.Array  # [num_tokens, hidden]
    squares: jax.Array  # f32 [num_tokens, 1]

    @classmethod
    def of(cls, x: jax.Array) -> Whole:
        return cls(x, sum_of_squares(x))

    def through(self, block: Block, step: StepInputs, cache: GroupCache) -> tuple[Whole, GroupCache]:
        attended, cache = block.attend(self.x, step, cache, self.squares)
        return Whole.of(block.feed_forward(attended, self.x, step)), cache

    def end(self) -> jax.Array:
        return self.x


class Halves(NamedTuple):
    """Of the features. The matmuls of a layer that it goes through have the kernels of all layers, and are told which
    is meant.
    """

    x: _Pair[jax.Array]  # [num_tokens, hidden / 2]
    added: _Pair[jax.Array]  # to be added to them: sums over devices, which may be on their way

    @classmethod
    def of(cls, x: jax.Array) -> Halves:
        first, second = jnp.split(x, 2, axis=1)
        return cls((first, second), (jnp.zeros_like(first), jnp.zeros_like(second)))

    @staticmethod
    def serve(config: ModelConfig) -> bool:
        """Whether every layer is two times a norm, matmuls over all features and one that gives all features."""
        return config.hidden_size % (2 * _LANES) == 0 and all(map(_is_served, config.blocks))

    def through(self, block: Block, step: StepInputs, cache: GroupCache) -> tuple[Halves, GroupCache]:
        attention, mlp, scale = block.attention, block.mlp, block.residual_scale
        if isinstance(mlp, Experts) or step.sum_halves is None:
            raise TypeError("only dense layers have halves, in steps that add them up")  # `serve` says so
        halves, projected = self._multiplied(block.attention_norm, (attention.q, attention.k, attention.v))
        attended, cache = attention.attended(projected, step, cache)
        halves = Halves(halves.x, _summed(step.sum_halves, attention.out, attended, scale, ends_layer=False))
        halves, (gate, up) = halves._multiplied(block.mlp_norm, (mlp.gate, mlp.up))
        inner = ACTIVATIONS[mlp.activation](gate) * up
        return Halves(halves.x, _summed(step.sum_halves, mlp.down, inner, scale, ends_layer=True)), cache

    def end(self) -> jax.Array:
        return jnp.concatenate([x + added for x, added in zip(*self, strict=True)], axis=1)

    def _multiplied(
        self, norm: RMSNorm | LayerNorm | None, linears: tuple[Linear, ...]
    ) -> tuple[Halves, list[jax.Array]]:
        """With everything added to it, and the products of its norm, each `[num_tokens, out]`."""
        if not isinstance(norm, RMSNorm):
            raise TypeError(f"halves have an RMSNorm before their matmuls, not {norm}")  # `serve` says so
        first, late = self.x[0] + self.added[0], self.added[1]
        sums = _products(first, norm, linears, 0)
        barrier: Any = jax.lax.optimization_barrier
        sums, late = barrier((sums, late))  # nothing waits for `late` before there are these
        second = self.x[1] + late
        inverse = norm.inverse(sum_of_squares(first) + sum_of_squares(second), 2 * first.shape[1])
        products = []
        for linear, y, z in zip(linears, sums, _products(second, norm, linears, 1), strict=True):
            normed = (y + z) * inverse
            wide = normed if linear.bias is None else normed + linear.bias[...].astype(jnp.float32)
            products.append(wide.astype(first.dtype))
        return Halves((first, second), self.added), products


def _summed(sum_halves: SumHalves, linear: Linear, x: jax.Array, scale: float, *, ends_layer: bool) -> _Pair[jax.Array]:
    """The product of `x`, `[num_tokens, in]`, added up over devices."""
    first, second = sum_halves(x, (_half(linear, 0, axis=1), _half(linear, 1, axis=1)), ends_layer=ends_layer)
    if linear.bias is not None:
        biases = jnp.split(linear.bias[...], 2)
        first, second = first + biases[0], second + biases[1]
    return scaled(first, scale), scaled(second, scale)


def _is_served(block: BlockConfig) -> bool:
    is_usual = block.norm_placement == "before" and block.norm.kind == "rms" and not block.parallel
    return is_usual and isinstance(block.mlp, MLPConfig) and not block.packed


def _products(x: jax.Array, norm: RMSNorm, linears: tuple[Linear, ...], half: int) -> list[jax.Array]:
    """Of that half of their input, in f32, without the norm's factor for a token."""
    scaled_x = (x.astype(jnp.float32) * norm.factors(jnp.float32, half)).astype(x.dtype)
    return [jnp.dot(scaled_x, _half(linear, half, axis=0), preferred_element_type=jnp.float32) for linear in linears]


def _half(linear: Linear, half: int, *, axis: int) -> jax.Array:
    """Of the kernel of the layer that is meant, cut out of that of all: a slice of a slice would be copied."""
    kernel, layer = linear.kernel[...], linear.layer  # [layers, in, out]
    if layer is None:
        raise TypeError("a matmul in halves is told its layer")
    shape = list(kernel.shape[1:])
    shape[axis] //= 2
    start = [half * size if i == axis else 0 for i, size in enumerate(shape)]
    return jax.lax.dynamic_slice(kernel, (layer, *start), (1, *shape))[0]

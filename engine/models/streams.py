"""The residual stream between the layers of a stacked decoder: as it is, or for sums over devices that travel while
others are computed.

Each half of a layer ends with a sum over devices, and what follows needs all of it: compiled as it is written, nothing
overlaps the links. In two parts (after Wang et al., "Overlap Communication with Dependent Computation via
Decomposition", ASPLOS 2023, which has one for each device) the sum of the first half of the features travels while the
second half is multiplied; that of the second while the next matmuls, which sum over features, begin with the first. A
norm between them is one factor for a token, which those matmuls apply to what they have summed.

Where some steps of a model are computed in two parts, others are in one, so that numbers are rounded at the same places
in all of them. What is left is the order in which a matmul sums, in f32, as between steps of different sizes anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from penstock.engine.models.attention import StepInputs, SumParts
from penstock.engine.models.block import Block, Cache
from penstock.engine.models.config import BlockConfig, MLPConfig, ModelConfig
from penstock.engine.models.experts import Experts
from penstock.engine.models.layers import ACTIVATIONS, LayerNorm, Linear, RMSNorm, scaled, sum_of_squares
from penstock.engine.models.recurrence import StateCache

_LANES = 128
_Parts = tuple[jax.Array, ...]
_Part = tuple[int, int]  # its number, and how many there are


class Whole(NamedTuple):
    """The sum of squares that the next layer begins with is computed on the way with the sum that a layer ends with:
    XLA expects it to take as long by itself.
    """

    x: jax.Array  # [num_tokens, hidden]
    squares: jax.Array  # f32 [num_tokens, 1]

    @classmethod
    def of(cls, x: jax.Array) -> Whole:
        return cls(x, sum_of_squares(x))

    def through(self, block: Block, step: StepInputs, cache: Cache) -> tuple[Whole, Cache]:
        attended, cache = block.attend(self.x, step, cache, self.squares)
        return Whole.of(block.feed_forward(attended, self.x, step)), cache

    def end(self) -> jax.Array:
        return self.x


class Parts(NamedTuple):
    """Of the features, one or two. The matmuls of a layer that they go through have the kernels of all layers, and are
    told which is meant.
    """

    x: _Parts  # [num_tokens, hidden / parts] each
    added: _Parts  # to be added to them: sums over devices, which may be on their way

    @classmethod
    def of(cls, x: jax.Array, num_parts: int) -> Parts:
        parts = tuple(jnp.split(x, num_parts, axis=1))
        return cls(parts, tuple(map(jnp.zeros_like, parts)))

    @staticmethod
    def serve(config: ModelConfig) -> bool:
        """Whether every layer is two times a norm, matmuls over all features and one that gives all features."""
        return config.hidden_size % (2 * _LANES) == 0 and all(map(_is_served, config.blocks))

    def through(self, block: Block, step: StepInputs, cache: Cache) -> tuple[Parts, Cache]:
        attention, mlp, scale = block.attention, block.mlp, block.residual_scale
        if isinstance(mlp, Experts) or isinstance(cache, StateCache) or step.sum_parts is None:
            raise TypeError("only dense layers with attention have parts, in steps that add them up")  # `serve` says so
        parts, projected = self.multiplied(block.attention_norm, attention.inputs)
        attended, cache = attention.attended(projected, step, cache)
        parts = parts.with_sum(step.sum_parts, attention.out, attended, scale, ends_layer=False)
        parts, (gate, up) = parts.multiplied(block.mlp_norm, (mlp.gate, mlp.up))
        inner = ACTIVATIONS[mlp.activation](gate) * up
        return parts.with_sum(step.sum_parts, mlp.down, inner, scale, ends_layer=True), cache

    def end(self) -> jax.Array:
        return jnp.concatenate([x + added for x, added in zip(*self, strict=True)], axis=1)

    def multiplied(
        self, norm: RMSNorm | LayerNorm | None, linears: tuple[Linear, ...]
    ) -> tuple[Parts, list[jax.Array]]:
        """With everything added to it, and the products of its norm, each `[num_tokens, out]`."""
        if not isinstance(norm, RMSNorm):
            raise TypeError(f"parts have an RMSNorm before their matmuls, not {norm}")  # `serve` says so
        whole: list[jax.Array] = []
        sums: list[jax.Array] = []
        barrier: Any = jax.lax.optimization_barrier
        for number, (x, added) in enumerate(zip(*self, strict=True)):
            # Nothing waits for the second part before there are the products of the first.
            sums, late = barrier((sums, added)) if sums else (sums, added)
            whole.append(x + late)
            products = _products(whole[-1], norm, linears, (number, len(self.x)))
            sums = [y + z for y, z in zip(sums, products, strict=True)] if sums else products
        squares = sum(map(sum_of_squares, whole[1:]), sum_of_squares(whole[0]))
        inverse = norm.inverse(squares, sum(x.shape[1] for x in whole))
        normed = [y * inverse for y in sums]
        biased = [
            y if linear.bias is None else y + linear.bias[...].astype(jnp.float32)
            for linear, y in zip(linears, normed, strict=True)
        ]
        return Parts(tuple(whole), self.added), [y.astype(whole[0].dtype) for y in biased]

    def with_sum(self, sum_parts: SumParts, linear: Linear, x: jax.Array, scale: float, *, ends_layer: bool) -> Parts:
        """With the product of `x`, `[num_tokens, in]`, to be added."""
        num_parts = len(self.x)
        kernels = tuple(_part(linear, (number, num_parts), axis=1) for number in range(num_parts))
        sums = sum_parts(x, kernels, ends_layer=ends_layer)
        if linear.bias is not None:
            sums = tuple(y + bias for y, bias in zip(sums, jnp.split(linear.bias[...], num_parts), strict=True))
        return Parts(self.x, tuple(scaled(y, scale) for y in sums))


def _is_served(block: BlockConfig) -> bool:
    is_usual = block.norm_placement == "before" and block.norm.kind == "rms" and not block.parallel
    is_plain = not (block.packed or block.per_layer or block.has_scalar)
    return is_usual and is_plain and block.has_attention and isinstance(block.mlp, MLPConfig)


def _products(x: jax.Array, norm: RMSNorm, linears: tuple[Linear, ...], part: _Part) -> list[jax.Array]:
    """Of that part of their input, in f32, without the norm's factor for a token."""
    scaled_x = (x.astype(jnp.float32) * norm.factors(jnp.float32, part)).astype(x.dtype)
    return [jnp.dot(scaled_x, _part(linear, part, axis=0), preferred_element_type=jnp.float32) for linear in linears]


def _part(linear: Linear, part: _Part, *, axis: int) -> jax.Array:
    """Of the kernel of the layer that is meant, cut out of that of all: a slice of a slice would be copied."""
    kernel, layer, (number, num_parts) = linear.kernel[...], linear.layer, part  # [layers, in, out]
    if layer is None:
        raise TypeError("a matmul in parts is told its layer")
    shape = list(kernel.shape[1:])
    shape[axis] //= num_parts
    start = [number * size if i == axis else 0 for i, size in enumerate(shape)]
    return jax.lax.dynamic_slice(kernel, (layer, *start), (1, *shape))[0]

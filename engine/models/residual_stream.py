"""The residual stream between the layers of a stacked decoder: plain, or in parts, so that sums over devices overlap
with computation.

Each half of a layer ends with a sum over devices, and what follows needs all of it. Compiled as written, nothing
overlaps the links. In two parts, the sum of the first half of the features travels while the second half is multiplied.
The sum of the second travels while the next matmuls, which sum over features, begin with the first. A norm in between
is one factor per token, which those matmuls apply to their sums. (After Wang et al., "Overlap Communication with
Dependent Computation via Decomposition", ASPLOS 2023, which has one part per device.)

If some steps of a model are computed in two parts, the others run in one part, so that numbers are rounded at the same
places in all of them. What still differs is the order in which a matmul sums, in f32, as between steps of different
sizes anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from penstock.engine.models.block import Block, Cache
from penstock.engine.models.config import BlockConfig, MLPConfig, ModelConfig
from penstock.engine.models.layers.attention import LayerInputs, SumParts
from penstock.engine.models.layers.basic import ACTIVATIONS, LayerNorm, RMSNorm, scaled, sum_of_squares
from penstock.engine.models.layers.experts import Experts
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.layers.recurrence import StateCache

_LANES = 128
_Parts = tuple[jax.Array, ...]
_Part = tuple[int, int]  # its number, and the number of parts


class Whole(NamedTuple):
    """The plain residual stream, with the sum of squares that the next layer begins with.

    The sum is computed together with the sum over devices that ends a layer: XLA expects it to take as long by itself.
    """

    x: jax.Array  # [num_tokens, hidden]
    squares: jax.Array  # f32 [num_tokens, 1]

    @classmethod
    def of(cls, x: jax.Array) -> Whole:
        return cls(x, sum_of_squares(x))

    def through(self, block: Block, step: LayerInputs, cache: Cache) -> tuple[Whole, Cache]:
        attended, cache = block.attend(self.x, step, cache, self.squares)
        return Whole.of(block.feed_forward(attended, self.x, step)), cache

    def end(self) -> jax.Array:
        return self.x


class ResidualStream(NamedTuple):
    """The residual stream in one or two parts of the features. The matmuls of its layers hold the kernels of all
    layers, and are told which layer's to use.
    """

    x: _Parts  # [num_tokens, hidden / parts] each
    added: _Parts  # to be added to `x`: sums over devices, which may still be in flight

    @classmethod
    def of(cls, x: jax.Array, num_parts: int) -> ResidualStream:
        parts = tuple(jnp.split(x, num_parts, axis=1))
        return cls(parts, tuple(map(jnp.zeros_like, parts)))

    @staticmethod
    def serve(config: ModelConfig) -> bool:
        """Checks whether every layer has two halves, each of a norm, matmuls over all features, and a matmul that
        returns all features.
        """
        return config.hidden_size % (2 * _LANES) == 0 and all(map(_is_served, config.blocks))

    def through(self, block: Block, step: LayerInputs, cache: Cache) -> tuple[ResidualStream, Cache]:
        attention, mlp, scale = block.attention, block.mlp, block.residual_scale
        if isinstance(mlp, Experts) or isinstance(cache, StateCache) or step.sum_parts is None:
            raise TypeError("only dense layers with attention have parts, in steps that add them up")  # `serve` says so
        parts, projected = self.multiplied(block.attention_norm, attention.inputs)
        attended, cache = attention.attended(projected, step, cache)
        parts = parts.with_sum(step.sum_parts, attention.out, attended, scale, ends_layer=False)
        parts, (gate, up) = parts.multiplied(block.mlp_norm, mlp.inputs)
        inner = ACTIVATIONS[mlp.activation](gate) * up
        return parts.with_sum(step.sum_parts, mlp.down, inner, scale, ends_layer=True), cache

    def end(self) -> jax.Array:
        return jnp.concatenate([x + added for x, added in zip(*self, strict=True)], axis=1)

    def multiplied(
        self, norm: RMSNorm | LayerNorm | None, linears: tuple[Linear, ...]
    ) -> tuple[ResidualStream, list[jax.Array]]:
        """Returns the parts with everything added, and the matmuls of their norm, each `[num_tokens, out]`."""
        if not isinstance(norm, RMSNorm):
            raise TypeError(f"parts have an RMSNorm before their matmuls, not {norm}")  # `serve` says so
        whole: list[jax.Array] = []
        sums: list[jax.Array] = []
        barrier: Any = jax.lax.optimization_barrier
        for number, (x, added) in enumerate(zip(*self, strict=True)):
            # Nothing waits for the second part before the first part's products are computed.
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
        return ResidualStream(tuple(whole), self.added), [y.astype(whole[0].dtype) for y in biased]

    def with_sum(
        self, sum_parts: SumParts, linear: Linear, x: jax.Array, scale: float, *, ends_layer: bool
    ) -> ResidualStream:
        """Returns the parts with the product of `x`, `[num_tokens, in]`, to be added."""
        num_parts = len(self.x)
        kernels = tuple(_part(linear, (number, num_parts), axis=1) for number in range(num_parts))
        sums = sum_parts(x, kernels, ends_layer=ends_layer)
        if linear.bias is not None:
            sums = tuple(y + bias for y, bias in zip(sums, jnp.split(linear.bias[...], num_parts), strict=True))
        return ResidualStream(self.x, tuple(scaled(y, scale) for y in sums))


def _is_served(block: BlockConfig) -> bool:
    is_usual = block.norm_placement == "before" and block.norm.kind == "rms" and not block.parallel
    is_plain = not (block.packed or block.per_layer or block.has_scalar)
    return is_usual and is_plain and block.has_attention and isinstance(block.mlp, MLPConfig)


def _products(x: jax.Array, norm: RMSNorm, linears: tuple[Linear, ...], part: _Part) -> list[jax.Array]:
    """Returns the matmuls of one part of their input, in f32, without the norm's factor for a token."""
    scaled_x = (x.astype(jnp.float32) * norm.factors(jnp.float32, part)).astype(x.dtype)
    return [jnp.dot(scaled_x, _part(linear, part, axis=0), preferred_element_type=jnp.float32) for linear in linears]


def _part(linear: Linear, part: _Part, *, axis: int) -> jax.Array:
    """Returns a part of one layer's kernel, cut out of the kernels of all layers at once: a slice of a slice would be
    copied.
    """
    kernel, layer, (number, num_parts) = linear.kernel[...], linear.layer, part  # [layers, in, out]
    if layer is None:
        raise TypeError("a matmul in parts is told its layer")
    shape = list(kernel.shape[1:])
    shape[axis] //= num_parts
    start = [number * size if i == axis else 0 for i, size in enumerate(shape)]
    return jax.lax.dynamic_slice(kernel, (layer, *start), (1, *shape))[0]

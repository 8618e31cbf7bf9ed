"""Matmuls with weights that stay quantized: every step unpacks them where they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from penstock.engine.formats.packing import PLANES, ZERO, Packing, leaf_shapes
from penstock.engine.models.config import PackedMatmuls
from penstock.engine.models.layers.linear import (
    F32,
    Arrays,
    Held,
    Linear,
    RowGroups,
    Weight,
    by_row,
    grouped_dot,
    rounded,
)

PIECE = 2**20  # weights that are unpacked at once, if in pieces
SMALL = 2**16  # weights that are not split into pieces
LEAST = 1e-36  # least maximum of a quantized row; 127 divided by less would be infinite


@dataclass(frozen=True)
class Quantized(Held):
    """A weight `[out, in]`, or one per expert, in the arrays of a Packing; every step unpacks them where they are used.

    A weight is rounded once, to the type of `x`, and products are summed in f32. With `has_int8_activations` rows of
    `x` are quantized too, and products are summed as integers.
    """

    packing: Packing
    shape: tuple[int, int]  # [out, in]
    is_in_pieces: bool = False
    input_axis: str | None = None  # the mesh axis whose devices each multiply their part of the input, under shard_map

    def empty(self, num_experts: int | None = None) -> dict[str, jax.Array]:
        """Returns arrays of zeros for one weight, or for one per expert."""
        leading = () if num_experts is None else (num_experts,)
        shapes = leaf_shapes(self.packing, *self.shape).items()
        return {name: jnp.zeros((*leading, *of_one), kind) for name, (of_one, kind) in shapes}

    def multiply(
        self, x: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, layer: jax.Array | None
    ) -> jax.Array:
        return rounded(
            (_multiply_in_pieces if self.is_in_pieces else _multiplied)(self.packing, arrays, x), bias, dtype
        )

    def multiply_groups(
        self, rows: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, groups: RowGroups
    ) -> jax.Array:
        y = (self._multiply_by_expert if self.is_in_pieces else self._together)(rows, arrays, groups)
        return rounded(y, by_row(bias, rows, groups), dtype)

    def columns(self, numbers: jax.Array, arrays: Arrays) -> jax.Array:
        """Returns columns in f32; only these are unpacked."""
        return unpacked(self.packing, {name: array[numbers] for name, array in arrays.items()})

    def _together(self, rows: jax.Array, arrays: Arrays, groups: RowGroups) -> jax.Array:
        kernels = unpacked(self.packing, arrays).astype(rows.dtype).swapaxes(1, 2)
        if not self.packing.has_int8_activations:
            return grouped_dot(rows, kernels, groups)
        codes, scales = quantized_rows(rows, self.input_axis)
        return grouped_dot(codes.astype(rows.dtype), kernels, groups) * scales

    def _multiply_by_expert(self, rows: jax.Array, arrays: Arrays, groups: RowGroups) -> jax.Array:
        numbers, ends = jnp.arange(rows.shape[0])[:, None], jnp.cumsum(groups.sizes)

        def multiply_expert(y: jax.Array, expert: tuple[Arrays, jax.Array, jax.Array]) -> tuple[Any, None]:
            leaves, start, end = expert

            def with_rows(y: jax.Array) -> jax.Array:
                is_own = (numbers >= start) & (numbers < end)
                return jnp.where(is_own, _multiply_in_pieces(self.packing, leaves, rows), y)

            return jax.lax.cond(end > start, with_rows, lambda y: y, y), None

        none = jnp.zeros((rows.shape[0], self.shape[0]), F32)
        y, _ = jax.lax.scan(multiply_expert, none, (dict(arrays), ends - groups.sizes, ends))
        return y


def quantize_modules(model: nnx.Module, packed: PackedMatmuls) -> None:
    """Replaces the matmuls that `packed` names, and an embedding, with quantized ones, which hold nothing yet."""
    for path, packing in packed:
        holder: Any = model
        for name in path[:-1]:
            holder = getattr(holder, name)
        setattr(holder, path[-1], _quantized(getattr(holder, path[-1]), packing))


def _quantized(plain: Weight | nnx.Param[jax.Array], packing: Packing) -> Weight:
    if isinstance(plain, nnx.Param):
        num_tokens, size = plain.shape
        held = Quantized(packing, (num_tokens, size))
        return Linear(held, held.empty())
    *experts, num_in, num_out = plain.kernel.shape
    held = Quantized(packing, (num_out, num_in))
    return type(plain)(held, held.empty(*experts), plain.bias_value)


def unpack_in_pieces(model: nnx.Module) -> None:
    """Makes a model unpack some rows of a weight at a time, and experts one by one: for a CPU that holds the whole
    model.

    XLA for CPUs starts with whatever waits for nothing, which would be to unpack the weights of all layers.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Weight) and isinstance(module.held, Quantized):
            module.held = replace(module.held, is_in_pieces=True)


def _multiplied(packing: Packing, leaves: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """Returns `x @ weight.T` in f32."""
    if packing.has_int8_activations:
        return _multiply_integers(packing, leaves, x)
    weight = unpacked(packing, leaves).astype(x.dtype)
    y: jax.Array = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=F32)
    return y


def _multiply_integers(packing: Packing, leaves: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """Multiplies like the CPU kernel: exact sums of each group, times its scale, and finally the scales of the rows.

    Groups whose features lie apart have no such sums.
    """
    rows, row_scales = quantized_rows(x)
    if packing.has_order:
        return _multiplied(replace(packing, has_int8_activations=False), leaves, rows.astype(x.dtype)) * row_scales
    scales = _scales(packing, leaves, "scales")
    num_groups = scales.shape[1]
    rows, codes = (array.reshape(array.shape[0], num_groups, -1) for array in (rows, _integers(packing, leaves)))
    sums = jnp.einsum("rgk,ogk->rog", rows, codes, preferred_element_type=jnp.int32).astype(F32)
    row_sums = jnp.sum(rows, axis=2, dtype=jnp.int32).astype(F32)[:, None]
    if packing.offset == "zeros":
        sums = sums - row_sums * leaves["zeros"].astype(F32)
    scaled = sums * scales
    if packing.offset == "minimums":
        scaled = scaled - row_sums * _scales(packing, leaves, "minimums")
    return jnp.sum(scaled, axis=2) * row_scales


def _integers(packing: Packing, leaves: Mapping[str, jax.Array]) -> jax.Array:
    """Returns codes, i8 `[out, in]`, with constant zero points subtracted."""
    if packing.code == "int8":
        return leaves["codes"]
    codes = _bits(leaves["codes"], PLANES[packing.code][0]).astype(jnp.int8)
    return codes - jnp.int8(ZERO[packing.code]) if packing.offset == "none" else codes


def quantized_rows(x: jax.Array, axis: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns i8 `[rows, in]` and scales f32 `[rows, 1]`: the values nearest to `x / scale`, with a row's largest at
    127.

    A row of nearly nothing becomes zeros. One with an infinity or a NaN has a scale of NaN. If the devices along the
    mesh axis `axis` have parts of the rows, the largest is that of all parts.
    """
    wide = x.astype(F32)
    largest = jnp.max(jnp.abs(wide), axis=1, keepdims=True)
    if axis is not None:
        largest = jax.lax.pmax(largest, axis)
    is_finite, is_large = jnp.isfinite(largest), largest > LEAST
    inverse = jnp.where(is_finite & is_large, 127 / largest, 0.0)
    rows = jnp.where(inverse > 0, jnp.rint(wide * inverse), 0.0).astype(jnp.int8)
    return rows, jnp.where(is_finite, jnp.where(is_large, largest / 127, 0.0), jnp.nan)


def _multiply_in_pieces(packing: Packing, leaves: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """Multiplies like `_multiplied`, in a loop over the rows of the weight; the remaining rows come last."""
    num_out, num_in = leaves["codes"].shape[0], x.shape[1]
    size = _rows_at_once(packing, num_out, num_in)
    if num_out * num_in <= SMALL or size >= num_out:
        return _multiplied(packing, leaves, x)
    count = num_out // size

    def multiply_rows(first: Any, num_rows: int) -> jax.Array:
        return _multiplied(packing, _rows(packing, leaves, first, num_rows), x)

    of_pieces = jax.lax.map(lambda piece: multiply_rows(piece * size, size), jnp.arange(count))
    y: jax.Array = of_pieces.swapaxes(0, 1).reshape(x.shape[0], -1)
    if count * size == num_out:
        return y
    return jnp.concatenate([y, multiply_rows(count * size, num_out - count * size)], axis=1)


def _rows_at_once(packing: Packing, num_out: int, num_in: int) -> int:
    """Returns the number of rows to unpack at once, in whole blocks.

    A divisor of the number of rows is preferred, because remaining rows are unpacked early.
    """
    block = max(packing.rows, 1)
    most = max(1, min(PIECE // num_in, num_out // 2) // block)
    even = next(size for size in range(most, 0, -1) if num_out // block % size == 0)
    return block * (even if block > 1 or 4 * even >= most else most)


def _rows(packing: Packing, leaves: Mapping[str, jax.Array], first: Any, count: int) -> dict[str, jax.Array]:
    """Returns what belongs to these rows of the weight, from each array."""
    cut = {}
    for name, leaf in leaves.items():
        block = packing.rows if name == "scales" else 1
        is_whole = name == "group_of" or block == 0
        cut[name] = leaf if is_whole else jax.lax.dynamic_slice_in_dim(leaf, first // block, -(-count // block), axis=0)
    return cut


def unpacked(packing: Packing, leaves: Mapping[str, jax.Array]) -> jax.Array:
    """Unpacks the weight `[..., out, in]` in f32 from `leaves`, named as by `leaf_shapes`; leading axes are kept."""
    codes = _codes(packing, leaves)
    scales, minimums = _scales(packing, leaves, "scales"), None
    if packing.offset == "minimums":
        minimums = _scales(packing, leaves, "minimums")
    if packing.offset == "zeros":
        codes = codes - _spread(packing, leaves["zeros"].astype(F32), codes.shape, leaves)
    values = codes * _spread(packing, scales, codes.shape, leaves)
    return values if minimums is None else values - _spread(packing, minimums, codes.shape, leaves)


def _codes(packing: Packing, leaves: Mapping[str, jax.Array]) -> jax.Array:
    """Returns codes, f32 `[..., out, in]`, with constant zero points subtracted."""
    if packing.code == "int8":
        return leaves["codes"].astype(F32)
    if packing.code == "fp8":
        return jax.lax.bitcast_convert_type(leaves["codes"], jnp.float8_e4m3fn).astype(F32)
    low, *high = (
        _bits(leaves[name], bits) for name, bits in zip(("codes", "high_bits"), PLANES[packing.code], strict=False)
    )
    if packing.code == "fp4":
        return _fp4(low)
    codes = low | high[0] << 4 if high else low
    zero = ZERO[packing.code] if packing.offset == "none" else 0
    as_f32: jax.Array = codes.astype(F32)
    return as_f32 - zero if zero else as_f32


def _bits(packed: jax.Array, bits: int) -> jax.Array:
    """Unpacks u8 `[..., n]` to codes `[..., n * 8 / bits]`."""
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)
    codes: jax.Array = (packed[..., None] >> shifts) & jnp.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def _fp4(codes: jax.Array) -> jax.Array:
    """Decodes a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats 1.0, E2M1)."""
    size = codes & 7
    doubled = jnp.where(size < 4, size, jnp.where(size < 6, 2 * size - 4, 4 * size - 16)).astype(F32)
    return jnp.where(codes >= 8, -0.5, 0.5) * doubled


def _scales(packing: Packing, leaves: Mapping[str, jax.Array], name: str) -> jax.Array:
    """Returns the scales or minimums `name`, f32 `[..., out groups, in groups]`."""
    scales = leaves[name]
    if packing.scale == "e8m0":
        return _powers_of_two(scales)
    if not packing.super_group:
        return scales.astype(F32)
    above = leaves[f"super_{name}"].astype(F32)
    return scales.astype(F32) * jnp.repeat(above, packing.super_group // packing.group, axis=-1)


def _powers_of_two(exponents: jax.Array) -> jax.Array:
    """Returns `2 ** (exponent - 127)`, exact, from the bits of an f32; the least is subnormal."""
    bits = jnp.where(exponents == 0, 1 << 22, exponents.astype(jnp.uint32) << 23)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32), F32)


def _spread(packing: Packing, groups: jax.Array, shape: tuple[int, ...], leaves: Mapping[str, jax.Array]) -> jax.Array:
    """Spreads `[..., out groups, in groups]` to the weights of `shape`, or to what broadcasts to it."""
    num_out, num_in = shape[-2:]
    if packing.rows > 1:
        groups = jnp.repeat(groups, packing.rows, axis=-2)[..., :num_out, :]
    if packing.has_order:
        return jnp.take_along_axis(groups, _order(leaves["group_of"], groups.ndim), axis=-1)
    return jnp.repeat(groups, packing.group, axis=-1)[..., :num_in] if packing.group else groups


def _order(group_of: jax.Array, num_dims: int) -> jax.Array:
    """Returns i32 `[..., in]` as `[..., 1, in]`; each weight of an expert or layer has an order of its own."""
    return jnp.expand_dims(group_of, -2) if group_of.ndim > 1 else group_of.reshape((1,) * (num_dims - 1) + (-1,))

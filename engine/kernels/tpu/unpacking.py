"""Decodes codes and scales inside a kernel: shapes are those of tiles in VMEM."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.formats.packing import ZERO, Packing

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32


def values_of(packing: Packing, codes: jax.Array) -> list[jax.Array]:
    """Returns f32 values of each plane of the codes `[rows, lanes]`: of all bytes, or of low nibbles and then high
    ones.

    Constant zero points have been subtracted.
    """
    if packing.code == "int8":
        return [codes.astype(I32).astype(F32)]
    if packing.code == "fp8":
        return [pltpu.bitcast(codes, jnp.float8_e4m3fn).astype(F32)]
    wide = codes.astype(I32)
    nibbles = (wide & 15, wide >> 4)
    if packing.code == "fp4":
        return [_fp4(nibble) for nibble in nibbles]
    zero = ZERO[packing.code] if packing.offset == "none" else 0
    return [(nibble - zero if zero else nibble).astype(F32) for nibble in nibbles]


def _fp4(codes: jax.Array) -> jax.Array:
    """Decodes a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6: except for the first two sizes, bits are moved to their
    places in an f32.
    """
    size = codes & 7
    normal = lax.bitcast_convert_type((size << 22) + (126 << 23), F32)
    magnitude = jnp.where(size < 2, size.astype(F32) * 0.5, normal)
    return jnp.where(codes >= 8, -magnitude, magnitude)


def parts_of(packing: Packing, held: jax.Array) -> list[jax.Array]:
    """Splits `held` scales or offsets into f32 arrays that sum to them; each value is exact in bf16."""
    wide = f32_of(packing, held)
    parts = []
    for _ in range(_num_parts(packing, held.dtype)):
        part = wide.astype(BF16).astype(F32)
        parts.append(part)
        wide = wide - part
    return parts


def f32_of(packing: Packing, held: jax.Array) -> jax.Array:
    if packing.scale == "e8m0":  # the smallest is a subnormal number, which is 0 here
        return lax.bitcast_convert_type(held.astype(I32) << 23, F32)
    if held.dtype == jnp.int16:
        return _f32_from_f16_bits(held.astype(I32))
    return (held.astype(I32) if held.dtype.itemsize == 1 else held).astype(F32)


def _num_parts(packing: Packing, dtype: jnp.dtype) -> int:
    """Returns the number of bf16 that hold all bits of a value: one for 8 bits, e8m0 and bf16, two for f16, three for
    f32.
    """
    return 1 if packing.scale == "e8m0" or dtype.itemsize == 1 else {"int16": 2, "float32": 3}.get(dtype.name, 1)


def _f32_from_f16_bits(bits: jax.Array) -> jax.Array:
    """Converts i32 bits to f32, exactly; subnormal numbers are made from their integers."""
    exponent, fraction = bits & 0x7C00, bits & 0x3FF
    normal = lax.bitcast_convert_type(((bits & 0x7FFF) << 13) + (112 << 23), F32)
    magnitude = jnp.where(exponent == 0, fraction.astype(F32) * 2.0**-24, normal)
    return jnp.where(bits & 0x8000 != 0, -magnitude, magnitude)


def _members(num_groups: int, group_lanes: int, num_lanes: int) -> jax.Array:
    """Returns f32 `[num_groups, num_lanes]`: 1 where a lane belongs to a group."""
    shape = (num_groups, num_lanes)
    first = lax.broadcasted_iota(I32, shape, 0) * group_lanes
    lane = lax.broadcasted_iota(I32, shape, 1)
    return ((lane >= first) & (lane < first + group_lanes)).astype(F32)


def spread(packing: Packing, held: jax.Array, group_lanes: int, num_lanes: int) -> jax.Array:
    """Spreads what is held as `[groups, rows]` to f32 `[rows, lanes]`, by a matmul with 0 and 1, which is exact.

    The matmul unit transposes it and repeats it along the lanes, which would take the vector unit longer.
    """
    parts = parts_of(packing, held)
    members = [_members(held.shape[0], group_lanes, num_lanes)] * len(parts)
    stacked, ones = (jnp.concatenate(arrays, axis=0).astype(BF16) for arrays in (parts, members))
    return lax.dot_general(stacked, ones, (((0,), (0,)), ((), ())), preferred_element_type=F32)


def spread_column(held: jax.Array, column: jax.Array, group_lanes: int, num_lanes: int) -> jax.Array:
    """Spreads one column of what is held as `[groups, columns]` to f32 `[1, lanes]`."""
    is_it = lax.broadcasted_iota(I32, held.shape, 1) == column
    of_groups = jnp.sum(jnp.where(is_it, held.astype(F32), 0.0), axis=1, keepdims=True)
    return jnp.sum(of_groups * _members(held.shape[0], group_lanes, num_lanes), axis=0, keepdims=True)

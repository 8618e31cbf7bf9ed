"""Decodes codes, scales and offsets inside a kernel: shapes are those of tiles in VMEM.

The vector units convert fp8 in one operation, and integers in more. So codes of four bits become bytes that are read as
fp8: the bytes 0 to 15 are its subnormal numbers and the first normal ones, which are equally far apart, and an fp4 with
its exponent in the place of fp8's lowest bits is that fp8, subnormal or not. All differ from the codes by a power of
two, which scales are multiplied by (`unit`). Units that compute with bfloat16 take codes of four bits as the lowest
ones of a bfloat16 from 128 on, two in an operation, and subtract the 128 with the zero point.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.formats.packing import ZERO
from penstock.engine.kernels.tpu.form import CODE_0, SUBLANES, KernelForm

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32


def values_of(form: KernelForm, codes: jax.Array) -> jax.Array:
    """Returns `[input, outputs]` of codes `[rows, outputs]`, in units of `form.unit`: f32, or what scales are in.

    Constant zero points have been subtracted, and `form.code_0` is left.
    """
    packing, fp8 = form.packing, jnp.dtype(form.fp8)
    kind = BF16 if form.is_scaled_in_bf16 else F32
    if packing.code == "int8":
        return codes.astype(I32).astype(F32).astype(kind)
    if packing.code == "fp8":
        return pltpu.bitcast(codes, fp8).astype(kind)
    if form.is_in_bf16_order:
        return _pairs_of(form, codes)
    words = pltpu.bitcast(pltpu.bitcast(codes, jnp.int4).astype(jnp.int8), I32)  # a byte for each, signs extended
    if packing.code == "fp4":
        return pltpu.bitcast((words & _each(0x80)) | ((words & _each(0x07)) << 2), fp8).astype(kind)
    values: jax.Array = pltpu.bitcast(words & _each(0x0F), fp8).astype(kind)
    zero = ZERO[packing.code] if packing.offset == "none" else 0
    return values - zero * form.unit if zero else values


def _pairs_of(form: KernelForm, codes: jax.Array) -> jax.Array:
    """Returns the bfloat16 of int4 in bf16 order."""
    packing = form.packing
    words = pltpu.bitcast(codes, I32).reshape(-1, 1, SUBLANES, codes.shape[1])
    pairs = jnp.concatenate([words if n == 0 else words >> 4 * n for n in range(4)], axis=1)
    bits = (pairs & 0x000F000F) | 0x43004300  # 128 and the code, twice
    values: jax.Array = pltpu.bitcast(bits.reshape(-1, codes.shape[1]), BF16)
    less = CODE_0 - form.code_0 + (ZERO[packing.code] if packing.offset == "none" else 0)
    return values - less if less else values


def _each(byte: int) -> jax.Array:
    """Returns the i32 of four equal bytes."""
    word: jax.Array = jnp.int32(int.from_bytes(bytes([byte] * 4), "little", signed=True))
    return word


def scales_of(form: KernelForm, held: jax.Array) -> jax.Array:
    """Returns the f32 factors of what `values_of` returns; NaN and infinity stay."""
    return _f32_of(form, held, 1 / form.unit)


def offsets_of(form: KernelForm, held: jax.Array) -> jax.Array:
    """Returns what is subtracted, in f32: zeros from values, in units of `form.unit`; minimums from scaled values."""
    offsets = _f32_of(form, held, form.unit if form.packing.offset == "zeros" else 1.0)
    return offsets + form.code_0 if form.code_0 else offsets


def _f32_of(form: KernelForm, held: jax.Array, factor: float) -> jax.Array:
    """Multiplies by a power of two, which is exact."""
    if held.dtype == jnp.int16:
        return _f32_from_f16_bits(held.astype(I32), factor)
    if form.packing.scale == "e8m0":  # the smallest is a subnormal number, which is 0 here
        wide = lax.bitcast_convert_type(held.astype(I32) << 23, F32)
    else:
        wide = (held.astype(I32) if held.dtype.itemsize == 1 else held).astype(F32)
    return wide if factor == 1 else wide * factor


def _f32_from_f16_bits(bits: jax.Array, factor: float) -> jax.Array:
    """Converts i32 bits to f32, times `factor`.

    Moved to f32's places, a normal number is itself, and a subnormal one lies below the least normal one, half as far
    as it should.
    """
    least, exponent = 2.0**-14 * factor, (112 + int(math.log2(factor))) << 23
    near = lax.bitcast_convert_type(((bits & 0x7FFF) << 13) + exponent, F32)
    magnitude = lax.bitcast_convert_type(jnp.minimum(near, near + near - least), I32)
    return lax.bitcast_convert_type(magnitude | (bits & jnp.int32(-(2**31))), F32)

"""Decodes codes, scales and offsets inside a kernel: shapes are those of tiles in VMEM.

The vector units convert fp8 in one operation, and integers in more. So codes of four bits become bytes that are read as
fp8: the bytes 0 to 15 are its subnormal numbers and the first normal ones, which are equally far apart, and an fp4 with
its exponent in the place of fp8's lowest bits is that fp8, subnormal or not. All differ from the codes by a power of
two, which scales are multiplied by (`unit`). Units that compute with bfloat16 convert signed int4 to it in one
operation.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.formats.packing import ZERO
from penstock.engine.kernels.tpu.form import KernelForm

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
BF16_BITS = 8  # of a bfloat16 that is exact
CODE_BITS = {"none": 3, "minimums": 3, "zeros": 4}  # significant ones, of an int4 minus 8 (up to 8), or its zero (15)


def values_of(form: KernelForm, codes: jax.Array) -> jax.Array:
    """Returns the values `[inputs, outputs]` of codes `[rows, outputs]`, in units of `form.unit`: f32 or bfloat16.

    Constant zero points have been subtracted.
    """
    packing, fp8 = form.packing, jnp.dtype(form.fp8)
    kind = BF16 if form.is_scaled_in_bf16 else F32
    if packing.code == "int8":
        return codes.astype(I32).astype(F32).astype(kind)
    if packing.code == "fp8":
        return pltpu.bitcast(codes, fp8).astype(kind)
    if form.is_centred:
        return pltpu.bitcast(codes, jnp.int4).astype(BF16)
    words = pltpu.bitcast(pltpu.bitcast(codes, jnp.int4).astype(jnp.int8), I32)  # a byte for each, signs extended
    if packing.code == "fp4":
        return pltpu.bitcast((words & _each(0x80)) | ((words & _each(0x07)) << 2), fp8).astype(kind)
    values: jax.Array = pltpu.bitcast(words & _each(0x0F), fp8).astype(kind)
    zero = ZERO[packing.code] if packing.offset == "none" else 0
    return values - zero * form.unit if zero else values


def _each(byte: int) -> jax.Array:
    """Returns the i32 of four equal bytes."""
    word: jax.Array = jnp.int32(int.from_bytes(bytes([byte] * 4), "little", signed=True))
    return word


def scales_of(form: KernelForm, held: jax.Array) -> jax.Array:
    """Returns the f32 factors of what `values_of` returns; NaN and infinity stay."""
    return _f32_of(form, held, 1 / form.unit)


def pair_of(form: KernelForm, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits scales of 11 bits into two parts, the larger ones first: f32 that bfloat16 represents exactly.

    The larger part keeps as many bits as its product with a code has room for. Because it is rounded, and not cut off,
    the rest has one bit less.
    """
    dropped = 24 - (BF16_BITS - CODE_BITS[form.packing.offset])  # of the bits of an f32
    bits = lax.bitcast_convert_type(scales, I32) + (1 << dropped - 1)
    larger = lax.bitcast_convert_type(bits & -(1 << dropped), F32)
    return larger, scales - larger


def offsets_of(form: KernelForm, held: jax.Array) -> jax.Array:
    """Returns what is subtracted, in f32: zeros from values, in units of `form.unit`; minimums from scaled values."""
    offsets = _f32_of(form, held, form.unit if form.packing.offset == "zeros" else 1.0)
    return offsets - ZERO[form.packing.code] if form.is_centred and form.packing.offset == "zeros" else offsets


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

    Once the bits are in their places in an f32, a normal number is right. A subnormal one lies below the least normal
    number, but only half as far below as it should.
    """
    least, exponent = 2.0**-14 * factor, (112 + int(math.log2(factor))) << 23
    near = lax.bitcast_convert_type(((bits & 0x7FFF) << 13) + exponent, F32)
    magnitude = lax.bitcast_convert_type(jnp.minimum(near, near + near - least), I32)
    return lax.bitcast_convert_type(magnitude | (bits & jnp.int32(-(2**31))), F32)

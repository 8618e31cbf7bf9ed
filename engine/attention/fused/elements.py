"""Elements of pages: how new ones come to the kernel, how they join the rows of a page, and what matmuls are given.

New codes of 8 bits come as the integers of their bytes, so a page of fp8 is written without a conversion.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.attention.quantization import is_quantized
from penstock.engine.kernels.tpu.form import FP8, FP8_OF_CHIPS

_WORD = 4  # bytes in a lane of a register
_PAGES_FP8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class PageElements:
    """How the kernel treats elements of pages of `dtype`, on a chip that converts `fp8` in one operation.

    The fp8 of TPUs before TPU7x has the same bytes as that of pages, in sixteenths; but -0 of one is a NaN of the
    other, so no page holds it.
    """

    dtype: str
    fp8: str = FP8

    @classmethod
    def on_chip(cls, dtype: str, device_kind: str | None) -> PageElements:
        """Returns the elements for a kind of device, which is named as JAX names it."""
        return cls(dtype, FP8_OF_CHIPS.get(device_kind or "", FP8))

    @property
    def new_dtype(self) -> str:
        """The type in which the kernel is given new keys and values: it represents them, or their integers, exactly."""
        return "float32" if self.dtype == "float32" else "bfloat16"

    @property
    def factor(self) -> float:
        """What `converted` has to be multiplied by: a power of two."""
        return 16.0 if self.dtype == _PAGES_FP8 and self.fp8 == FP8 else 1.0

    @property
    def rows_per_word(self) -> int:
        """Rows of a tile whose elements share a word."""
        return _WORD // jnp.dtype(self.dtype).itemsize

    def passed(self, codes: jax.Array) -> jax.Array:
        """Returns codes as the kernel is given them. An fp8 of -0 becomes 0."""
        if codes.dtype == _PAGES_FP8:
            codes = lax.bitcast_convert_type(codes, jnp.int8)
            codes = jnp.where(codes == -128, 0, codes)
        return codes.astype(self.new_dtype)

    def bits(self, new: jax.Array) -> jax.Array:
        """Returns the bits of `new`, f32 of what `passed` returned: i32, with an element in the lowest bits."""
        if is_quantized(self.dtype):
            return new.astype(jnp.int32) & 0xFF
        word = pltpu.bitcast(new, jnp.int32)
        return word if self.rows_per_word == 1 else lax.shift_right_logical(word, 16)

    def with_row(self, rows: jax.Array, place: jax.Array, bits: jax.Array) -> jax.Array:
        """Returns a tile's `rows` [rows, lanes] with `bits`, i32 [1, lanes], at row `place`; -1: unchanged."""
        words, per_word = pltpu.bitcast(rows, jnp.int32), self.rows_per_word
        shift = (place & (per_word - 1)) * (32 // per_word)
        is_here = lax.broadcasted_iota(jnp.int32, (words.shape[0], 1), 0) == place >> (per_word.bit_length() - 1)
        element = jnp.int32(-1 if per_word == 1 else (1 << (32 // per_word)) - 1)
        others = words & ~(element << shift)
        return pltpu.bitcast(jnp.where(is_here, others | (bits << shift), words), rows.dtype)

    def widened(self, rows: jax.Array) -> jax.Array:
        """Returns a page's rows as f32, in the form in which `passed` gives new elements."""
        return (pltpu.bitcast(rows, jnp.int8) if rows.dtype == _PAGES_FP8 else rows).astype(jnp.float32)

    def narrowed(self, rows: jax.Array) -> jax.Array:
        """Converts rows in the form of `widened` to the type of pages."""
        return pltpu.bitcast(rows.astype(jnp.int8), self.dtype) if self.dtype == _PAGES_FP8 else rows.astype(self.dtype)

    def converted(self, rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Returns rows for a matmul in `dtype`, in units of `factor`."""
        return (pltpu.bitcast(rows, self.fp8) if rows.dtype == _PAGES_FP8 else rows).astype(dtype)

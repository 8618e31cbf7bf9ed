"""Keys and values in 8 bits."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from penstock.engine.attention.quantization import dequantized, is_quantized, quantized, stored

FP8 = jnp.dtype("float8_e4m3fn")


def test_fp8_is_clipped_to_its_range_and_keeps_a_nan() -> None:
    x = jnp.asarray([0.0, 1.0, -448.0, 1e6, -1e6, jnp.inf, jnp.nan], jnp.bfloat16)
    expected = np.array([0.0, 1.0, -448.0, 448.0, -448.0, 448.0, np.nan], np.float32)
    np.testing.assert_array_equal(quantized(x, FP8).astype(jnp.float32), expected)


def test_int8_is_scaled_rounded_and_clipped() -> None:
    x = jnp.asarray([0.0, 0.26, -0.26, 100.0, -100.0])
    np.testing.assert_array_equal(quantized(x, jnp.dtype("int8"), 0.1), [0, 3, -3, 127, -128])


@pytest.mark.parametrize(
    ("dtype", "holds"), [("int8", True), ("float8_e4m3fn", True), ("bfloat16", False), ("float32", False)]
)
def test_types_of_eight_bits_are_quantized(dtype: str, holds: bool) -> None:
    assert is_quantized(dtype) is holds


def test_pages_of_wider_types_keep_values_as_they_are() -> None:
    x = jnp.asarray([1e6, -0.3], jnp.float32)
    np.testing.assert_array_equal(stored(x, jnp.dtype("float32")), x)
    assert stored(x, FP8).dtype == FP8
    assert dequantized(stored(x, FP8), jnp.dtype("float32")).dtype == jnp.float32
    assert dequantized(x.astype(jnp.bfloat16), jnp.dtype("float32")).dtype == jnp.bfloat16  # JAX promotes that itself

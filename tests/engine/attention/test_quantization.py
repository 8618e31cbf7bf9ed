"""8-bit keys and values."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.engine.attention.quantization import dequantized, is_quantized, largest_code, quantized_by_token


@pytest.mark.parametrize(("dtype", "top"), [("int8", 127), ("float8_e4m3fn", 448)])
def test_a_row_reaches_the_largest_code_whatever_its_size(dtype: str, top: float) -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(200, 16)) * np.exp(rng.uniform(-60, 60, (200, 1)))).astype(np.float32)
    codes, scales = map(np.asarray, quantized_by_token(jnp.asarray(x), dtype))
    assert largest_code(dtype) == top
    np.testing.assert_array_equal(np.abs(codes.astype(np.float32)).max(axis=1), top)
    np.testing.assert_array_equal(scales, np.abs(x).max(axis=1) * np.float32(1 / top))


def test_fp8_is_rounded_as_the_type_is() -> None:
    """Rounding is to the nearest, ties to even, in one step: no type lies between f32 and fp8."""
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(size=(500, 32)), np.linspace(-1, 1, 16000).reshape(-1, 32)]).astype(np.float32)
    codes, scales = map(np.asarray, quantized_by_token(jnp.asarray(x), "float8_e4m3fn"))
    expected = (x * (1 / scales)[:, None]).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(codes.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(
    ("dtype", "holds"), [("int8", True), ("float8_e4m3fn", True), ("bfloat16", False), ("float32", False)]
)
def test_types_of_eight_bits_are_quantized(dtype: str, holds: bool) -> None:
    assert is_quantized(dtype) is holds


def test_codes_are_promoted_and_wider_types_stay() -> None:
    x = jnp.asarray([1.0, -0.3], jnp.bfloat16)
    assert dequantized(x.astype("float8_e4m3fn"), jnp.dtype("float32")).dtype == jnp.float32
    assert dequantized(x, jnp.dtype("float32")).dtype == jnp.bfloat16  # JAX promotes that itself

"""Keys and values that pages hold in 8 bits (fp8 or int8), and are computed with in more."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def quantized(x: jax.Array, dtype: jnp.dtype, scale: float = 1.0) -> jax.Array:
    """`x / scale` in an 8-bit type: rounded, and clipped to the type's range instead of becoming infinite or NaN.

    A NaN stays one where the type has it.
    """
    x = x.astype(jnp.float32) / scale
    if jnp.issubdtype(dtype, jnp.integer):
        limits: Any = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
        return jnp.clip(jnp.round(x), limits.min, limits.max).astype(dtype)
    top = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return jnp.clip(x, -top, top).astype(dtype)


def is_quantized(dtype: jnp.dtype | str) -> bool:
    return int(jnp.dtype(dtype).itemsize) == 1


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Keys or values as pages of `dtype` keep them."""
    return quantized(x, dtype) if is_quantized(dtype) else x.astype(dtype)


def dequantized(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What pages hold, of `dtype` where it is of 8 bits and else as it is: JAX promotes no 8-bit type by itself."""
    return x.astype(dtype) if is_quantized(x.dtype) else x

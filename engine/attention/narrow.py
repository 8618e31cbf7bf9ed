"""Keys and values in types narrower than they are computed in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def narrowed(x: jax.Array, dtype: jnp.dtype, scale: float = 1.0) -> jax.Array:
    """`x / scale` in a type of 8 bits: rounded, and cut to the type's range instead of becoming infinite or NaN.

    A NaN stays one where the type has it.
    """
    x = x.astype(jnp.float32) / scale
    if jnp.issubdtype(dtype, jnp.integer):
        limits: Any = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
        return jnp.clip(jnp.round(x), limits.min, limits.max).astype(dtype)
    top = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return jnp.clip(x, -top, top).astype(dtype)


def is_narrow(dtype: jnp.dtype | str) -> bool:
    return int(jnp.dtype(dtype).itemsize) == 1


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Keys or values as pages of `dtype` keep them."""
    return narrowed(x, dtype) if is_narrow(dtype) else x.astype(dtype)


def widened(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What pages hold, of `dtype` where it is of 8 bits and else as it is: JAX promotes no 8-bit type by itself."""
    return x.astype(dtype) if is_narrow(x.dtype) else x

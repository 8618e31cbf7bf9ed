"""Keys and values that pages hold in 8 bits (fp8 or int8), and are computed with in more."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SMALLEST_SCALE = 1e-30  # with an inverse that is finite, whether or not small numbers count as 0


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


def quantized_by_token(x: jax.Array) -> tuple[jax.Array, jax.Array]:  # [..., head_dim] -> int8, f32 [...]
    """Codes of -127 to 127, and the scale of each row of them. A row with a NaN or an infinity has no finite scale."""
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1) * np.float32(1 / 127)  # a product, which compilers leave as it is
    inverse = jnp.where((scales > _SMALLEST_SCALE) & jnp.isfinite(scales), 1 / scales, 0)[..., None]
    return jnp.where(inverse > 0, jnp.round(x * inverse), 0).astype(jnp.int8), scales


def kv_head_bytes(head_dim: int, dtype: str) -> int:
    """Of the keys of one token and head, or of its values, with their scale if they have one."""
    scale = jnp.dtype(jnp.float32).itemsize if dtype == "int8" else 0
    return head_dim * int(jnp.dtype(dtype).itemsize) + scale


def is_quantized(dtype: jnp.dtype | str) -> bool:
    return int(jnp.dtype(dtype).itemsize) == 1


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Keys or values as pages of `dtype` keep them."""
    return quantized(x, dtype) if is_quantized(dtype) else x.astype(dtype)


def dequantized(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What pages hold, of `dtype` where it is of 8 bits and else as it is: JAX promotes no 8-bit type by itself."""
    return x.astype(dtype) if is_quantized(x.dtype) else x

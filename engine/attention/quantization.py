"""8-bit keys and values in pages: codes, and a scale for each token and head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penstock.engine.models.attention_interface import KVScales

QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")
_SMALLEST_SCALE = 1e-30  # its inverse is finite, whether or not denormals are flushed to 0


def quantized_by_token(
    x: jax.Array,  # [..., head_dim]
    dtype: jnp.dtype | str,
    static_scales: jax.Array | None = None,  # f32, broadcasts to [...]; finite and above 1e-30
) -> tuple[jax.Array, jax.Array]:
    """Returns codes of `dtype`, shaped like `x`, and the f32 scale of each row of codes, `[...]`. A code times its
    scale is `x`.

    A row's scale is its largest magnitude divided by the type's. With `static_scales` it is the one from there, and
    larger values are clipped. Codes of int8 are rounded, and range from -127 to 127. A row with a NaN or an infinity
    has a scale that is not finite, and codes of 0: no code is NaN.
    """
    x, top = x.astype(jnp.float32), largest_code(dtype)
    largest = jnp.max(jnp.abs(x), axis=-1)
    if static_scales is None:
        scales = largest * np.float32(1 / top)  # a product: compilers do not rewrite it
    else:
        scales = jnp.where(jnp.isfinite(largest), static_scales, largest)
    inverse = jnp.where((scales > _SMALLEST_SCALE) & jnp.isfinite(scales), 1 / scales, 0)[..., None]
    codes = jnp.where(inverse > 0, jnp.clip(x * inverse, -top, top), 0)
    codes = jnp.round(codes) if jnp.issubdtype(dtype, jnp.integer) else codes
    return codes.astype(dtype), scales


def quantized_kv(
    k: jax.Array,  # [num_tokens, num_kv_heads, head_dim]
    v: jax.Array,
    dtype: jnp.dtype | str,
    static: KVScales | None,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns codes and scales of a step's keys, and of its values, as pages of `dtype` hold them.

    A NaN or an infinity among the values becomes 0: a weight of 0 does not cancel it, and it would outlive its
    sequence.
    """
    v = jnp.nan_to_num(v, posinf=0, neginf=0)
    of_keys, of_values = (None, None) if static is None else static
    return quantized_by_token(k, dtype, of_keys), quantized_by_token(v, dtype, of_values)


def largest_code(dtype: jnp.dtype | str) -> float:
    """Returns the largest magnitude that both signs have: 127 or 448."""
    if jnp.issubdtype(dtype, jnp.integer):
        integers: Any = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
        return float(integers.max)
    return float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]


def kv_head_bytes(head_dim: int, dtype: str) -> int:
    """Returns the bytes of the keys, or of the values, of one token and head, with their scale if they have one."""
    scale = jnp.dtype(jnp.float32).itemsize if is_quantized(dtype) else 0
    return head_dim * int(jnp.dtype(dtype).itemsize) + scale


def is_quantized(dtype: jnp.dtype | str) -> bool:
    """Checks whether pages of this type hold codes, with scales beside them."""
    return jnp.dtype(dtype).name in QUANTIZED_DTYPES


def dequantized(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Converts codes to `dtype`, and leaves anything else as it is. The conversion is explicit because JAX promotes no
    8-bit float.
    """
    return x.astype(dtype) if is_quantized(x.dtype) else x

"""Keys and values that pages hold in 8 bits, as codes and a scale for each token and head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penstock.engine.models.attend import KVScales

QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")
_SMALLEST_SCALE = 1e-30  # with an inverse that is finite, whether or not small numbers count as 0


def quantized_by_token(
    x: jax.Array,  # [..., head_dim]
    dtype: jnp.dtype | str,
    static_scales: jax.Array | None = None,  # f32, of a shape that broadcasts to [...]; above 1e-30, finite
) -> tuple[jax.Array, jax.Array]:
    """Codes of `dtype`, shaped as `x`, and the f32 scale of each row of them, `[...]`: a code times its scale is `x`.

    A row's scale is its largest magnitude over the type's, or that of `static_scales`, which what is larger is clipped
    to. Codes of int8 are rounded and go from -127 to 127. A row with a NaN or an infinity has no finite scale, and
    codes of 0: no code is NaN.
    """
    x, top = x.astype(jnp.float32), largest_code(dtype)
    largest = jnp.max(jnp.abs(x), axis=-1)
    if static_scales is None:
        scales = largest * np.float32(1 / top)  # a product, which compilers leave as it is
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
    """Codes and scales of a step's keys, and of its values, as pages of `dtype` hold them.

    A NaN or an infinity among the values counts as 0: a weight of 0 does not undo it, and it would
    outlive its sequence.
    """
    v = jnp.nan_to_num(v, posinf=0, neginf=0)
    of_keys, of_values = (None, None) if static is None else static
    return quantized_by_token(k, dtype, of_keys), quantized_by_token(v, dtype, of_values)


def largest_code(dtype: jnp.dtype | str) -> float:
    """The largest magnitude of both signs: 127 or 448."""
    if jnp.issubdtype(dtype, jnp.integer):
        integers: Any = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
        return float(integers.max)
    return float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]


def kv_head_bytes(head_dim: int, dtype: str) -> int:
    """Of the keys of one token and head, or of its values, with their scale if they have one."""
    scale = jnp.dtype(jnp.float32).itemsize if is_quantized(dtype) else 0
    return head_dim * int(jnp.dtype(dtype).itemsize) + scale


def is_quantized(dtype: jnp.dtype | str) -> bool:
    """Whether pages of this type hold codes, with scales beside them."""
    return jnp.dtype(dtype).name in QUANTIZED_DTYPES


def dequantized(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What pages hold: codes in `dtype`, and all else as it is, as JAX promotes no 8-bit float by itself."""
    return x.astype(dtype) if is_quantized(x.dtype) else x

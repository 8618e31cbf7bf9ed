"""Scales of 8-bit keys and values: a pair for each token and KV head.

Outside the pages there is a row per token, with the pairs of its KV heads along the lanes. In a page, tokens lie along
the lanes, as keys do in scores: scores are multiplied by the row of the keys' scales, weights by that of the values'.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from penstock.engine.attention.fused.layout import LANES
from penstock.engine.attention.fused.softmax import Int, aligned, place_lanes
from penstock.engine.kernels.pallas import Ref


def scale_lanes(num_kv_heads: int) -> int:
    """Returns the number of lanes in a token's row of scales."""
    return -(-2 * num_kv_heads // LANES) * LANES


def scale_rows(keys: jax.Array, values: jax.Array) -> jax.Array:
    """Lays out the scales of keys and of values, each f32 [num_tokens, num_kv_heads], as the kernel takes them."""
    num_tokens, num_kv_heads = keys.shape
    rows = jnp.stack([keys, values], axis=2).reshape(num_tokens, -1)
    return jnp.pad(rows, ((0, 0), (0, scale_lanes(num_kv_heads) - rows.shape[1])))


def with_scales(held: Ref, head: Int, key: Int, new: jax.Array) -> tuple[Ref, jax.Array]:
    """Returns the tile of `held`, a piece's scales [num_kv_heads, 2, rows], that has a head's scales at `key`; and its
    contents with `new`, f32 [2, LANES], there. If `key` is -1, these are unchanged.
    """
    start = aligned(jnp.maximum(key, 0) // LANES * LANES, LANES)
    is_new = lax.broadcasted_iota(jnp.int32, (2, LANES), 1) == key - start
    tile = held.at[head, :, pl.ds(start, LANES)]
    return tile, jnp.where(is_new, new, tile[...])


def place_scales(
    held: Ref,  # [pieces, num_kv_heads, 2, rows]
    rows: jax.Array,  # f32 [num_tokens, lanes]
    place: jax.Array,  # f32 [keys, num_tokens]: 1 where a key is the token's, otherwise 0
    is_new: jax.Array,  # bool [2, keys]: which keys are new
) -> None:
    """Writes each token's scales at its key; exact, by matmuls with ones and zeros.

    Scales of values are finite even if those of keys are not, and stay so, because the two are separated before they
    are summed.
    """
    pieces, num_kv_heads, _, num_rows = held.shape
    chosen = jnp.where(_is_row(2 * num_kv_heads, rows.shape[1]), 1.0, 0.0)
    is_value = lax.broadcasted_iota(jnp.int32, rows.shape, 1) % 2 == 1
    all_scales, of_values = (
        place_lanes(place_lanes(chosen, scales), place) for scales in (rows, jnp.where(is_value, rows, 0.0))
    )
    is_value = lax.broadcasted_iota(jnp.int32, all_scales.shape, 0) % 2 == 1
    new = jnp.where(is_value, of_values, all_scales)
    for head in range(num_kv_heads):  # unrolled: rows of a value can only be taken at fixed places
        for piece in range(pieces):
            keys = slice(piece * num_rows, (piece + 1) * num_rows)
            held[piece, head] = jnp.where(is_new[:, keys], new[2 * head : 2 * head + 2, keys], held[piece, head])


def _is_row(num_rows: int, lanes: int) -> jax.Array:
    """Returns where a lane and a row have the same number: bool [num_rows, lanes]."""
    lane = lax.broadcasted_iota(jnp.int32, (num_rows, lanes), 1)
    return lane == lax.broadcasted_iota(jnp.int32, (num_rows, lanes), 0)

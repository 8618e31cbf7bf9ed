"""Parameters that rows of logits are sampled with, and the random numbers that every form of sampling uses."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

NOT_A_TOKEN = -1
"""Sampled if a logit is NaN or plus infinity: the model's numbers broke down for that row."""

NOTHING_LEFT = -2
"""Sampled if every token is forbidden, by the request or by logits of minus infinity."""

NEVER = -1e30
"""The logit of a forbidden token: softmax gives it exactly 0, and it stays finite when shifted."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SamplingRows:
    temperature: jax.Array  # f32 [num_rows]; 0 is greedy
    top_p: jax.Array  # f32 [num_rows]
    min_p: jax.Array  # f32 [num_rows]
    top_k: jax.Array  # i32 [num_rows]; 0 keeps all
    seed: jax.Array  # u32 [num_rows, 2]
    output_index: jax.Array  # i32 [num_rows]


def uniforms(rows: SamplingRows) -> jax.Array:
    """Returns f32 `[num_rows]` in [0, 1), each a function of its row's seed and output index alone."""
    return jax.vmap(_uniform)(rows.seed, rows.output_index)


def _uniform(seed: jax.Array, output_index: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, output_index))


def ordered_to_float(ordered: jax.Array) -> jax.Array:
    """Maps u32 to f32 so that the order is kept: the sign bit is flipped, negative numbers are mirrored."""
    sign = jnp.uint32(0x80000000)
    return jax.lax.bitcast_convert_type(jnp.where(ordered >= sign, ordered ^ sign, ~ordered), jnp.float32)

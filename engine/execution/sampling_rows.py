"""Parameters that rows of logits are sampled with, and the random numbers that every form of sampling uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np

from penstock.engine.request import SamplingParams

NOT_A_TOKEN = -1
"""Sampled if a logit is NaN or plus infinity: the model's numbers broke down for that row."""

NOTHING_LEFT = -2
"""Sampled if every token is forbidden, by the request or by logits of minus infinity."""

NEVER = -1e30
"""The logit of a forbidden token: softmax gives it exactly 0, and it stays finite when shifted."""


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """Fields of `SamplingParams` that tokens are drawn by, as arrays `[num_rows]`, or as columns `[num_rows, 1]`.

    They are i32 where `SamplingParams` has an integer, and otherwise f32. The words that a step uploads and the lanes
    of the TPU's kernel follow from this declaration.
    """

    temperature: jax.Array  # 0 is greedy
    top_p: jax.Array
    min_p: jax.Array
    top_k: jax.Array  # 0 keeps all

    @property
    def columns(self) -> DrawParameters:
        return DrawParameters(*(getattr(self, name)[:, None] for name in PARAMETERS))

    @property
    def has_floor(self) -> jax.Array:
        """Whether rows have a `floor`."""
        return self.min_p > 0.0

    def floor(self, top: jax.Array) -> jax.Array:
        """Returns the least logits that are kept by filters without a search; minus infinity where there are none.

        Args:
            top: the highest logits, which are kept whatever the parameters.
        """
        return top + jnp.log(self.min_p)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SamplingRows(DrawParameters):
    seed: jax.Array  # u32 [num_rows, 2]
    output_index: jax.Array  # i32 [num_rows]


GREEDY = SamplingParams(temperature=0.0)
PARAMETERS: Mapping[str, type[np.generic]] = {
    each.name: np.int32 if isinstance(getattr(GREEDY, each.name), int) else np.float32
    for each in fields(DrawParameters)
}
NUM_SAMPLING_WORDS = len(PARAMETERS) + 3
"""32-bit words of a row: its parameters, two of the seed, and the output index."""


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

"""The device's side of a packed step: its parts by name, as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from penstock.engine.attention import GroupedBatch
from penstock.engine.execution.geometry import ArrayLayout
from penstock.engine.execution.sampling.extended_rows import ADJUSTED, BIASED, ExtendedRows
from penstock.engine.execution.sampling_rows import PARAMETERS, SamplingRows
from penstock.engine.models import WantedTokens
from penstock.engine.models.layers.recurrence import StateBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StepInputs:
    token_ids: jax.Array  # i32 [num_tokens]
    sources: jax.Array  # i32 [num_tokens]: the last step's row that sampled this token, -1 for an uploaded id
    positions: jax.Array  # i32 [num_tokens]
    rope_lengths: jax.Array  # i32 [num_tokens], or [0] if the model does not use them
    ragged: GroupedBatch
    states: StateBatch | None  # None: the model keeps none
    sampled: WantedTokens  # up to max_seqs: the token whose hidden state each sampled row takes
    sampling: jax.Array  # i32 [max_seqs, words]


def unpack_step(layout: ArrayLayout, flat: jax.Array) -> StepInputs:
    parts = layout.unpack(flat)
    ragged = GroupedBatch(
        slots=tuple(parts["slots"]),
        kv_lens=parts["kv_lens"],
        page_indices=tuple(parts["page_indices"]),
        cu_q_lens=parts["cu_q_lens"],
        num_seqs=parts["num_seqs"],
    )
    return StepInputs(
        token_ids=parts["token_ids"],
        sources=parts["sources"],
        positions=parts["positions"],
        rope_lengths=parts["rope_lengths"],
        ragged=ragged,
        states=_unpack_states(parts) if parts["state_reads"].size else None,
        sampled=WantedTokens(parts["sampled_tokens"], parts["num_sampled"]),
        sampling=parts["sampling"],
    )


def _unpack_states(parts: Mapping[str, jax.Array]) -> StateBatch:
    ends, numbers = parts["cu_q_lens"][1:], jnp.arange(parts["positions"].shape[0])
    rows = jnp.minimum(jnp.searchsorted(ends, numbers, side="right"), ends.shape[0] - 1)  # the last row for padding
    offsets = numbers - parts["cu_q_lens"][rows]
    return StateBatch(parts["state_reads"], parts["state_ends"], parts["state_writes"], rows, offsets)


def lengths_at(positions: jax.Array, rope_lengths: jax.Array) -> jax.Array | None:
    """Returns the lengths of the sequences of tokens at `positions`; None if the model does not use them."""
    return jnp.maximum(positions + 1, rope_lengths) if rope_lengths.size else None


def unpack_sampling(words: jax.Array) -> SamplingRows:  # i32 [num_rows, words]
    end = len(PARAMETERS)
    values = {
        name: words[:, place] if kind is np.int32 else _as_float(words[:, place])
        for place, (name, kind) in enumerate(PARAMETERS.items())
    }
    return SamplingRows(
        **values,
        seed=jax.lax.bitcast_convert_type(words[:, end : end + 2], jnp.uint32),
        output_index=words[:, end + 2],
    )


def unpack_extended(layout: ArrayLayout, flat: jax.Array) -> ExtendedRows:
    words = layout.unpack(flat)["words"]
    return ExtendedRows(
        slot=words[:, 0],
        is_adjusted=words[:, 1] & ADJUSTED > 0,
        is_biased=words[:, 1] & BIASED > 0,
        repetition_penalty=_as_float(words[:, 2]),
        presence_penalty=_as_float(words[:, 3]),
        frequency_penalty=_as_float(words[:, 4]),
        min_tokens=words[:, 5],
        target=words[:, 6],
        draft=words[:, 7],
        is_scored=words[:, 8] > 0,
    )


def _as_float(words: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, jnp.float32)

"""The device's side of a packed step: its parts by name, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from penstock.engine.attention import RaggedBatch
from penstock.engine.execution.geometry import Layout
from penstock.engine.execution.sampling import ExtendedRows, SamplingRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the backbone and the head read of a step."""

    token_ids: jax.Array  # i32 [num_tokens]
    sources: jax.Array  # i32 [num_tokens]: the row of the last step that sampled this token, -1 for an uploaded id
    positions: jax.Array  # i32 [num_tokens]
    ragged: RaggedBatch
    sampled_tokens: jax.Array  # i32 [max_seqs]: the token whose hidden state each sampled row takes
    sampling: jax.Array  # i32 [max_seqs, words]


def unpack_step(layout: Layout, flat: jax.Array) -> StepInputs:
    parts = layout.unpack(flat)
    ragged = RaggedBatch(
        slots=parts["slots"],
        kv_lens=parts["kv_lens"],
        page_indices=parts["page_indices"],
        cu_q_lens=parts["cu_q_lens"],
        num_seqs=parts["num_seqs"],
    )
    return StepInputs(
        token_ids=parts["token_ids"],
        sources=parts["sources"],
        positions=parts["positions"],
        ragged=ragged,
        sampled_tokens=parts["sampled_tokens"],
        sampling=parts["sampling"],
    )


def unpack_sampling(words: jax.Array) -> SamplingRows:  # i32 [num_rows, words]
    return SamplingRows(
        temperature=_as_float(words[:, 0]),
        top_p=_as_float(words[:, 1]),
        min_p=_as_float(words[:, 2]),
        top_k=words[:, 3],
        seed=jax.lax.bitcast_convert_type(words[:, 4:6], jnp.uint32),
        output_index=words[:, 6],
    )


def unpack_extended(layout: Layout, flat: jax.Array, last_tokens: jax.Array) -> ExtendedRows:
    """`last_tokens` holds the tokens in flight, which the host could not upload with the rest of the history."""
    parts = layout.unpack(flat)
    words = parts["words"]
    in_flight = (parts["sources"][:, None] >= 0) & (jnp.arange(parts["history"].shape[1])[None] == words[:, 5:6])
    history = jnp.where(in_flight, last_tokens[parts["sources"]][:, None], parts["history"])
    return ExtendedRows(
        history=history,
        num_prompt=words[:, 0],
        repetition_penalty=_as_float(words[:, 1]),
        presence_penalty=_as_float(words[:, 2]),
        frequency_penalty=_as_float(words[:, 3]),
        bias_ids=parts["bias_ids"],
        bias=_as_float(parts["bias"]),
        is_restricted=words[:, 4],
        is_allowed=parts["is_allowed"],
        blocked_ids=parts["blocked_ids"],
        targets=parts["targets"],
    )


def _as_float(words: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, jnp.float32)

"""Several decode steps in one dispatch: the device feeds itself what it samples, and stops once every row has ended.

For models so small that the device needs little longer for a step than the host needs to dispatch it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.attention import AttentionBackend, GroupedBatch, attend_in_groups
from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.sampling.extended import sample_extended
from penstock.engine.execution.sampling.logprobs import Logprobs, no_logprobs
from penstock.engine.execution.sampling.sampling import Form
from penstock.engine.execution.sampling.sampling_state import SamplingState
from penstock.engine.execution.unpacking import lengths_at, unpack_extended, unpack_sampling, unpack_step
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.recurrence import StateBatch
from penstock.engine.sharding.placement import Placement


def decode_loop(
    model: Decoder,
    attention: AttentionBackend,
    geometry: Geometry,
    num_rows: int,
    num_steps: int,
    placement: Placement | None,
    form: Form,
    cache: Any,
    state: SamplingState,
    last_tokens: jax.Array,  # i32 [max_rows]: what the step before sampled
    flat: jax.Array,  # i32: the packed first step, whose sequences have one token each
    stops: jax.Array,  # i32: the packed stop ids
    options: jax.Array,  # i32: the packed extended options
) -> tuple[jax.Array, Logprobs, jax.Array, Any, SamplingState]:
    """Samples `num_steps` tokens for each row.

    Returns the tokens as i32 `[num_steps, max_rows]`, their log-probabilities with a row per step, the last tokens as
    i32 `[max_rows]`, and the new cache and state. Tokens after the one that ends a row mean nothing, and their keys and
    values go to the sink.
    """
    inputs = unpack_step(geometry.step_layout(num_rows), flat)
    ends = geometry.stops_layout(num_rows).unpack(stops)
    first = jnp.where(inputs.sources >= 0, last_tokens[inputs.sources], inputs.token_ids)
    is_real = jnp.arange(num_rows) < inputs.ragged.num_seqs[0]
    is_active = is_real & (ends["limits"] > 0)
    sampling = unpack_sampling(inputs.sampling)
    extended = unpack_extended(geometry.extended_layout(num_rows), options)

    def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, is_active, token_ids, tokens, logprobs, cache, state = carry
        positions = jnp.where(is_active, inputs.positions + step, 0)
        ragged = _batch_at(positions, inputs.ragged, is_real, is_active, geometry.page_size)
        attend, lengths = (
            attend_in_groups(attention, ragged, geometry.page_size),
            lengths_at(positions, inputs.rope_lengths),
        )
        states = None if inputs.states is None else _states_at(step, inputs.states, ends, is_active)
        held = _unpacked_after(token_ids, model)
        hidden, cache = held(token_ids, positions, cache, attend, is_active, lengths, states=states)
        rows = replace(sampling, output_index=sampling.output_index + step)
        sampled, of_step, state = sample_extended(
            lambda order: held.logits(hidden[order], inputs.ragged.num_seqs),
            rows,
            extended,
            state,
            placement=placement,
            form=form,
            raw_logprobs=geometry.raw_logprobs,
        )
        logprobs = jax.tree.map(partial(_put, step=step), logprobs, of_step)
        has_ended = _has_ended(sampled, step, ends)
        tokens = tokens.at[step, :num_rows].set(sampled)
        return step + 1, is_active & ~has_ended, sampled, tokens, logprobs, cache, state

    tokens = jnp.zeros((num_steps, geometry.max_rows), jnp.int32)
    logprobs = no_logprobs(num_steps, num_rows, geometry.vocab_size)
    carry = (jnp.int32(0), is_active, first, tokens, logprobs, cache, state)
    _, _, last, tokens, logprobs, cache, state = jax.lax.while_loop(partial(_is_going_on, num_steps), advance, carry)
    return tokens, logprobs, jnp.pad(last, (0, geometry.max_rows - num_rows)), cache, state


def _is_going_on(num_steps: int, carry: tuple[Any, ...]) -> jax.Array:
    step: jax.Array = carry[0]
    return (step < num_steps) & jnp.any(carry[1])


def _batch_at(
    positions: jax.Array, first: GroupedBatch, is_real: jax.Array, is_active: jax.Array, page_size: int
) -> GroupedBatch:
    """Returns the batch whose sequences have one token each at `positions`, derived from the first step's batch."""
    slots = tuple(jnp.where(is_active, _slots(table, positions, page_size), 0) for table in first.page_indices)
    return replace(first, slots=slots, kv_lens=jnp.where(is_real, positions + 1, 0))


def _states_at(step: jax.Array, first: StateBatch, ends: Mapping[str, jax.Array], is_active: jax.Array) -> StateBatch:
    """Returns the states of a later step: until it ends, each row reads what its step before wrote."""
    num_rows = is_active.shape[0]

    def slots_of(step: jax.Array) -> jax.Array:
        has_switched = (ends["switch_slots"] > 0) & (step >= ends["switch_steps"])
        return jnp.where(has_switched, ends["switch_slots"], first.writes[:num_rows])

    rows = jnp.arange(num_rows)
    reads = jnp.where(step > 0, slots_of(step - 1), first.reads)
    return StateBatch(reads, rows, jnp.where(is_active, slots_of(step), 0), rows, jnp.zeros_like(rows))


def _put(all_: jax.Array, one: jax.Array, step: jax.Array) -> jax.Array:
    updated: jax.Array = jax.lax.dynamic_update_index_in_dim(all_, one, step, axis=0)
    return updated


def _has_ended(sampled: jax.Array, step: jax.Array, ends: Mapping[str, jax.Array]) -> jax.Array:
    """Returns which rows have ended: by a stop token, by an invalid one, or at their limit."""
    has_ended = jnp.any(sampled[:, None] == ends["stop_ids"], axis=-1) | (sampled < 0)
    return has_ended | (step + 1 >= ends["limits"])


def _unpacked_after(token_ids: jax.Array, model: Decoder) -> Decoder:
    """Makes quantized weights wait for `token_ids`, or a compiler would unpack them all before the loop."""
    if not model.config.is_packed:
        return model
    graph, state = nnx.split(model)
    state, _ = jax.lax.optimization_barrier((state, token_ids))
    return nnx.merge(graph, state)


def _slots(table: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    """Returns the KV slot of each sequence's token at a position, from a page table."""
    page = jnp.take_along_axis(table, (positions // page_size)[:, None], axis=1)[:, 0]
    return page * page_size + positions % page_size

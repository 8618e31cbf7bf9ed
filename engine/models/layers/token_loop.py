"""A recurrence over a step's tokens, one by one: each sequence continues from its states, and leaves new ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from penstock.engine.models.layers.recurrence import StateBatch, StateCache

LoopStates = tuple[jax.Array, ...]
"""The states of one sequence."""
Inputs = TypeVar("Inputs")
_Carry = tuple[jax.Array, jax.Array, LoopStates, jax.Array, LoopStates]


def scan_tokens(
    token: Callable[[Inputs, LoopStates], tuple[jax.Array, LoopStates]],
    inputs: Inputs,  # arrays [num_tokens, ...]
    results: jax.Array,  # [num_tokens, ...]: values for padding
    positions: jax.Array,  # i32 [num_tokens]
    batch: StateBatch,
    cache: StateCache,
) -> tuple[jax.Array, StateCache]:
    """Applies `token` to each token's inputs and the states before it. It returns the token's result and the states
    after it.

    Every token runs through the same program on the same shapes, whether it belongs to a prompt or decodes, and
    whatever else is in the step. So its result cannot depend on how a prompt is split.

    The outer loop is over the states to write, the inner one over the tokens up to each. In the inner loop, states are
    in memory of their own. They are read from the cache where a sequence begins, and written there where the step
    requests one.
    """
    num_tokens, most, first = positions.shape[0], batch.writes.shape[0], cache.first_slot
    num_writes = jnp.sum(batch.writes > 0)
    order = jnp.argsort(jnp.where(batch.writes > 0, batch.ends, num_tokens))

    def one(t: jax.Array, carry: tuple[LoopStates, jax.Array]) -> tuple[LoopStates, jax.Array]:
        states, results = carry
        result, states = token(jax.tree.map(lambda array: _token_at(array, t), inputs), states)
        return states, jax.lax.dynamic_update_index_in_dim(results, result, t, 0)

    def piece(carry: _Carry) -> _Carry:
        number, start, states, results, held = carry
        place = order[number]
        end = batch.ends[place]
        begin = end - batch.offsets[end]  # where its sequence begins
        read = first + batch.reads[batch.rows[end]]
        goes_on, has_past = start > begin, positions[begin] > 0
        states = tuple(
            jnp.where(goes_on, state, jnp.where(has_past, _token_at(array, read), 0))
            for state, array in zip(states, held, strict=True)
        )
        states, results = jax.lax.fori_loop(jnp.maximum(start, begin), end + 1, one, (states, results))
        held = tuple(
            jax.lax.dynamic_update_index_in_dim(array, state, first + batch.writes[place], 0)
            for state, array in zip(states, held, strict=True)
        )
        return number + 1, end + 1, states, results, held

    def is_going_on(carry: _Carry) -> jax.Array:
        return (carry[0] < num_writes) & (carry[0] < most)  # the second is a number that the planner can read

    none = tuple(jnp.zeros(array.shape[1:], array.dtype) for array in cache.arrays)
    carry = (jnp.int32(0), jnp.int32(0), none, results, cache.arrays)
    *_, results, held = jax.lax.while_loop(is_going_on, piece, carry)
    return results, cache._replace(arrays=held)


def _token_at(array: jax.Array, index: jax.Array) -> jax.Array:
    found: jax.Array = jax.lax.dynamic_index_in_dim(array, index, 0, keepdims=False)
    return found

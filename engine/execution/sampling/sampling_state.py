"""What sampling remembers of each running sequence. It stays on the device, so that no step uploads it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.sampling_rows import NEVER

IN_PROMPT = 1
STOPS = 2
GENERATED = 4
"""Bits of a token's word: the third and all above it count how often the token was generated."""

LANES = 128
"""Words of a row that a TPU moves at once."""

_WORD = np.int32  # a TPU moves single rows of 32-bit words alone
_MOST_SLICES = 16  # in a program


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SamplingState:
    """A row per batch slot, valid only while its holder's sampling options need it.

    Everything follows from the holder's tokens and request: a row is written when the holder first samples after a
    start, and then updated by what it samples.
    """

    tokens: jax.Array  # i32 [num_slots, width]: IN_PROMPT, STOPS, and how often each was GENERATED
    bias: jax.Array  # f32 [num_slots, width]: NEVER for forbidden tokens
    vocab_size: int = field(metadata={"static": True})  # the rest of `width` is never looked at


@dataclass(frozen=True, slots=True)
class SlotFill:
    """The initial row of one batch slot."""

    slot: np.int32
    tokens: np.ndarray  # i32 [width]
    bias: np.ndarray  # f32 [width]


def sampling_state(geometry: Geometry, make: Callable[[tuple[int, int], np.dtype[Any]], Any]) -> SamplingState:
    """Builds a state of arrays that `make` returns for a shape and a type."""
    shape = (geometry.max_num_seqs, _width(geometry))
    tokens, bias = (make(shape, np.dtype(kind)) for kind in (_WORD, np.float32))
    return SamplingState(tokens, bias, geometry.vocab_size)


def state_bytes(geometry: Geometry) -> int:
    """Returns the bytes of the state on each device."""
    per_token = np.dtype(_WORD).itemsize + np.dtype(np.float32).itemsize
    return geometry.max_num_seqs * _width(geometry) * per_token


def slot_fill(
    geometry: Geometry,
    slot: int,
    prompt: list[int],
    generated: list[int],
    stops: Iterable[int],
    bias: Mapping[int, float],
    allowed: tuple[int, ...],
    bad: tuple[int, ...],
) -> SlotFill:
    """Returns the row for a sequence with these tokens. If `allowed` has tokens, no others are; `bad` ones are not."""
    tokens = np.zeros(_width(geometry), _WORD)
    np.add.at(tokens, generated, GENERATED)
    tokens[prompt] |= IN_PROMPT
    tokens[list(stops)] |= STOPS
    biases = np.zeros(_width(geometry), np.float32)
    if allowed:
        biases[:] = NEVER
        biases[list(allowed)] = 0.0
    if bias:
        ids = np.fromiter(bias, np.int64)
        biases[ids] = np.where(biases[ids] == 0.0, np.fromiter(bias.values(), np.float32), NEVER)
    biases[list(bad)] = NEVER
    return SlotFill(np.int32(slot), tokens, biases)


def filled(state: SamplingState, slot: jax.Array, tokens: jax.Array, bias: jax.Array) -> SamplingState:
    """Returns the state with one slot's row replaced."""
    return replace(
        state,
        tokens=jax.lax.dynamic_update_index_in_dim(state.tokens, tokens, slot, axis=0),
        bias=jax.lax.dynamic_update_index_in_dim(state.bias, bias, slot, axis=0),
    )


def rows_of(array: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns the rows of some slots from an array of the state.

    They are sliced one by one: given a gather of wide rows, a TPU's compiler would copy the whole array.
    """
    if len(slots) > _MOST_SLICES:
        return array[slots]
    rows: jax.Array = jnp.concatenate([jax.lax.dynamic_slice_in_dim(array, slot, 1) for slot in slots])
    return rows


def counted(state: SamplingState, slots: jax.Array, token_ids: jax.Array, is_counted: jax.Array) -> SamplingState:
    """Returns the state after rows sampled `token_ids`. Uncounted rows and invalid tokens are dropped."""
    num_slots = state.tokens.shape[0]
    places = jnp.where(is_counted & (token_ids >= 0), slots, num_slots)
    one = jnp.asarray(GENERATED, state.tokens.dtype)
    return replace(state, tokens=state.tokens.at[places, token_ids].add(one, mode="drop"))


def _width(geometry: Geometry) -> int:
    """Returns the words of a row: whole tiles, because a TPU moves nothing less."""
    return -(-geometry.vocab_size // LANES) * LANES

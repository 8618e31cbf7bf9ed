"""The step inputs of layers that keep states, and their interface to the holder of the states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StateBatch:
    """The states that a step reads and writes, and its tokens' places in their sequences.

    Sequence i begins with the state in slot `reads[i]`, or with zeros if its first token of the step is at position 0.
    The state after token `ends[j]` goes to slot `writes[j]`; padding goes to slot 0, the sink, and nothing else does.
    No slot is read by one sequence and written by another, nor written twice. So a kernel may process sequences in any
    order and write where it reads.

    A state may be requested after any token, not only the last of a sequence. It depends, to the last bit, only on the
    tokens up to there: neither on how they were split into steps, nor on what else those steps held.
    """

    reads: jax.Array  # i32 [max_seqs]
    ends: jax.Array  # i32 [num_writes]: tokens of the step
    writes: jax.Array  # i32 [num_writes]: slots
    rows: jax.Array  # i32 [num_tokens]: the sequence of each token
    offsets: jax.Array  # i32 [num_tokens]: number of its sequence's tokens before it in the step


class StateCache(NamedTuple):
    """A layer's share of the states: arrays `[slots, ...]` as its config declares them. A stacked decoder has one array
    for all layers of a kind, layer by layer.
    """

    arrays: tuple[jax.Array, ...]
    first_slot: int | jax.Array = 0

"""What layers that keep states are given of a step, and the border between them and whoever holds the states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StateBatch:
    """Which states a step reads and writes, and where its tokens stand in their sequences.

    Sequence i begins with the state in slot `reads[i]`; where its first token of the step is at position 0, with one of
    zeros, whatever the slot holds. The state behind token `ends[j]` goes to slot `writes[j]`; padding goes to slot 0,
    the sink, and nothing else does. No slot is read by one sequence and written by another, nor written twice, so that
    a kernel may take sequences in any order and write where it reads.

    A state may be asked for behind any token, not at the end of a sequence's tokens alone. It follows, to the last bit,
    from the tokens up to there: neither from how they were divided over steps, nor from what else was in those.
    """

    reads: jax.Array  # i32 [max_seqs]
    ends: jax.Array  # i32 [num_writes]: tokens of the step
    writes: jax.Array  # i32 [num_writes]: slots
    rows: jax.Array  # i32 [num_tokens]: the sequence of each token
    offsets: jax.Array  # i32 [num_tokens]: tokens of its sequence before it in the step


class StateCache(NamedTuple):
    """A layer's share of the states: arrays `[slots, ...]` as its config declares them. In a stacked decoder those of
    all layers of a kind are one array, layer by layer.
    """

    arrays: tuple[jax.Array, ...]
    first_slot: int | jax.Array = 0

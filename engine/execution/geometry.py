"""The fixed set of step shapes, and the layout of the array that each step uploads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import numpy as np

from penstock.engine.execution.sampling_rows import NUM_SAMPLING_WORDS
from penstock.engine.request import MAX_STOP_TOKENS

MIN_BUCKET = 16

_NUM_EXTENDED_WORDS = 9


@dataclass(frozen=True, slots=True)
class Geometry:
    max_num_seqs: int
    max_batch_tokens: int
    max_model_len: int
    page_size: int
    vocab_size: int
    num_groups: int = 1  # layer groups, each with pages of its own
    few_shapes: bool = False  # for platforms where compiling is slow
    has_lengths: bool = False  # whether rotary frequencies may depend on a sequence's length
    has_states: bool = False  # whether layers keep states
    raw_logprobs: bool = False  # whether log-probabilities are those of the model, before any adjustment

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """Token counts that steps are padded to."""
        return _buckets(self.max_batch_tokens, few=self.few_shapes)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Counts that sampled rows are padded to."""
        return _buckets(self.max_num_seqs, few=self.few_shapes)

    @property
    def extended_row_buckets(self) -> tuple[int, ...]:
        """Row buckets of steps with extended sampling; with few shapes, every second one, the largest included."""
        return self.row_buckets[::-2][::-1] if self.few_shapes else self.row_buckets

    @property
    def max_rows(self) -> int:
        return self.row_buckets[-1]

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)

    @property
    def mask_words(self) -> int:
        """Words of a row's token mask: bit b of word w is token 32 * w + b."""
        return -(-self.vocab_size // 32)

    def token_bucket(self, num_tokens: int) -> int:
        return _bucket(num_tokens, self.token_buckets)

    def row_bucket(self, num_rows: int, *, extended: bool = False) -> int:
        return _bucket(num_rows, self.extended_row_buckets if extended else self.row_buckets)

    def step_layout(self, num_tokens: int) -> ArrayLayout:
        """Returns the layout of the array that a step of a token bucket uploads."""
        max_seqs = min(num_tokens, self.max_rows)
        return ArrayLayout(
            token_ids=(num_tokens,),
            sources=(num_tokens,),
            positions=(num_tokens,),
            rope_lengths=(num_tokens if self.has_lengths else 0,),
            slots=(self.num_groups, num_tokens),
            kv_lens=(max_seqs,),
            cu_q_lens=(max_seqs + 1,),
            num_seqs=(1,),
            page_indices=(self.num_groups, max_seqs, self.pages_per_seq),
            state_reads=(max_seqs if self.has_states else 0,),
            state_ends=(self.state_writes(num_tokens),),
            state_writes=(self.state_writes(num_tokens),),
            sampled_tokens=(max_seqs,),
            num_sampled=(1,),
            sampling=(max_seqs, NUM_SAMPLING_WORDS),
        )

    def stops_layout(self, num_rows: int) -> ArrayLayout:
        """Returns the layout of the second array that several decode steps in one dispatch upload.

        It says when each row ends, and at which step its states switch to which other slot.
        """
        switches = (num_rows if self.has_states else 0,)
        return ArrayLayout(
            stop_ids=(num_rows, MAX_STOP_TOKENS), limits=(num_rows,), switch_steps=switches, switch_slots=switches
        )

    def state_writes(self, num_tokens: int) -> int:
        """Returns how many states a step may write: one after each row, and one at each page end within it.

        This suffices however prompts are chunked. A row of n tokens has at most ceil((n - 1) / page_size) page ends
        between its first and its last token, one more than its pages' worth; a single token has none.
        """
        return min(num_tokens, 2 * self.max_rows + num_tokens // self.page_size) if self.has_states else 0

    def extended_layout(self, num_rows: int) -> ArrayLayout:
        """Returns the layout of the array that only steps with extended sampling upload."""
        return ArrayLayout(words=(num_rows, _NUM_EXTENDED_WORDS))


class ArrayLayout:
    """Named i32 parts of one flat array."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self._parts: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        self.size = 0
        for name, shape in shapes.items():
            end = self.size + math.prod(shape)
            self._parts[name] = (self.size, end, shape)
            self.size = end

    def empty(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns a new array of zeros and views of its parts. New each time: the device may still read the last."""
        flat = np.zeros(self.size, np.int32)
        return flat, {name: flat[start:end].reshape(shape) for name, (start, end, shape) in self._parts.items()}

    def unpack(self, flat: jax.Array) -> dict[str, jax.Array]:
        return {name: flat[start:end].reshape(shape) for name, (start, end, shape) in self._parts.items()}


def _bucket(count: int, buckets: tuple[int, ...]) -> int:
    return next(bucket for bucket in buckets if bucket >= count)


def _buckets(at_least: int, *, few: bool) -> tuple[int, ...]:
    """Returns powers of two and, unless `few`, from 32 on, a number between neighbours."""
    buckets = [MIN_BUCKET]
    while buckets[-1] < at_least:
        last = buckets[-1]
        is_power = last & (last - 1) == 0
        step = last // 2 if is_power else last // 3
        buckets.append(2 * last if few or last == MIN_BUCKET else last + step)
    return tuple(buckets)

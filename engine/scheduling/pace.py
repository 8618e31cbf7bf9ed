"""Limits how much one step may hold, from measured step times, so that streams flow evenly.

Prompts are computed in chunks, in the same steps as decoding sequences (Agrawal et al., Sarathi-Serve, arXiv
2403.02310). The size of a chunk is not fixed: it follows from the step's time with and without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

PROMPT_WEIGHT = 2
"""A waiting prompt counts as this many decoding sequences: a missing first token hurts more than a late next one."""

MIN_CHUNK = 16
"""Prompt tokens that every step may compute, so that prompts advance whatever the times say."""

LONGEST_STEPS = 1.25
"""Prompts never add more than this many times the longest measured step.

Steps are measured at the beginning of a prompt. Far into a prompt, attention makes a whole chunk take many times as
long.
"""

WORTH_IT = 1.2
"""Factor by which drafts must raise the token rate: neither times nor chances are known exactly."""

WAKE_S = 0.0005
"""Cost of not overlapping host and device, beyond the host's own work: the round trip to the device, and threads that
went to sleep meanwhile. Measured on a CPU with two cores.
"""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds that steps take on the device, by bucket, for short sequences."""

    prompt_s: Mapping[int, float]  # by token bucket: one row is sampled
    decode_s: Mapping[int, float]  # by row bucket: each row is sampled
    pair_s: float = 0.0  # added by each pair of a query and an earlier key
    few_s: Mapping[int, float] = field(default_factory=dict)  # steps that sample less than the smallest row bucket
    loop_s: Mapping[int, float] = field(default_factory=dict)  # by row bucket: one of several steps in a dispatch

    @property
    def longest_s(self) -> float:
        """Seconds of a step that prompts fill."""
        return max(self.prompt_s.values())

    def step_s(self, num_tokens: int, num_rows: int, num_pairs: int) -> float:
        """Returns the seconds of a step with `num_tokens` tokens that samples `num_rows` rows."""
        tokens_s = self.prompt_s[_bucket(self.prompt_s, num_tokens)]
        return tokens_s + self.sampling_s(num_rows) + num_pairs * self.pair_s

    def decoding_s(self, num_decoding: int, num_pairs: int) -> float:
        return self.decode_s[_bucket(self.decode_s, num_decoding)] + num_pairs * self.pair_s

    def sampled_s(self, num_sampled: int, num_pairs: int) -> float:
        """Returns the seconds of a step that samples after each of its tokens.

        Within the smallest bucket it interpolates the times measured there, since kernels may skip padding.
        """
        smallest = min(self.decode_s)
        if num_sampled >= smallest or not self.few_s:
            return self.decoding_s(num_sampled, num_pairs)
        measured = sorted({**self.few_s, smallest: self.decode_s[smallest]}.items())
        for (low, low_s), (high, high_s) in pairwise(measured):
            if num_sampled <= high:
                share = max(0, num_sampled - low) / (high - low)
                return low_s + max(0.0, high_s - low_s) * share + num_pairs * self.pair_s
        raise AssertionError(f"{num_sampled} is below {smallest}, and no step of {measured} is larger")

    def sampling_s(self, num_decoding: int) -> float:
        """Returns the part of a decode step's time that its rows take and its tokens do not."""
        bucket = _bucket(self.decode_s, num_decoding)
        return max(0.0, self.decode_s[bucket] - self.prompt_s.get(bucket, 0.0))


@dataclass(frozen=True, slots=True)
class Pace:
    """Limits on a step in addition to `max_batch_tokens`. By default there are none."""

    times: StepTimes | None = None
    prefill_share: float = 1.0  # share of the longest step that prompts may add to a decoding step; 1: all
    decode_steps: Mapping[int, int] = field(default_factory=dict)  # in one dispatch, by row bucket; default 1

    def max_steps(self, num_rows: int) -> int:
        """Returns the number of decode steps that one dispatch of `num_rows` rows may hold."""
        buckets = [bucket for bucket in self.decode_steps if bucket >= num_rows]
        return self.decode_steps[min(buckets)] if buckets else 1

    def foretold_s(self, num_tokens: int, num_rows: int, num_pairs: int) -> float | None:
        """Returns the expected seconds of such a step, or None if nothing was measured."""
        return None if self.times is None else self.times.step_s(num_tokens, num_rows, num_pairs)

    def num_drafts(self, num_rows: int, num_pairs: int, chances: Sequence[float], host_s: float) -> int:
        """Returns the number of drafted tokens to verify in a step, chosen for the highest token rate.

        Args:
            num_rows: decoding sequences in the step.
            num_pairs: their total length in tokens.
            chances: probability that each draft counts, in descending order.
            host_s: seconds that the host works for a step; these overlap with the device unless drafts wait for its
                results.
        """
        best, best_rate, num_tokens = 0, num_rows / self._decoding_s(num_rows, num_pairs) * WORTH_IT, float(num_rows)
        for count, chance in enumerate(chances, 1):
            num_tokens += chance
            step_s = self._verifying_s(num_rows + count, num_pairs * (num_rows + count) // num_rows)
            rate = num_tokens / (step_s + host_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _decoding_s(self, num_rows: int, num_pairs: int) -> float:
        """Returns the seconds of a step without drafts. If nothing was measured, all steps count the same."""
        if self.times is None:
            return 1.0
        looped_s = [seconds for bucket, seconds in sorted(self.times.loop_s.items()) if bucket >= num_rows]
        if looped_s:
            return looped_s[0] + num_pairs * self.times.pair_s
        return self.times.sampled_s(num_rows, num_pairs)

    def _verifying_s(self, num_rows: int, num_pairs: int) -> float:
        """Returns the seconds of a step with drafts, on a device that waited for it."""
        return 1.0 if self.times is None else self.times.sampled_s(num_rows, num_pairs) + WAKE_S

    def prompt_budget(self, decoding: Iterable[int], num_prompts: int) -> PromptBudget:
        """Returns the budget for prompts in a step in which sequences of these lengths decode.

        The limit is a time, not a proportion of the step. A decode step of few sequences is short; prompts cut to fit
        it would come late, and nobody would notice the gain. Waiting counts on both sides: a prompt next to two streams
        may fill the step, and so may a burst. `LONGEST_STEPS` bounds even these: streams wait for the step, and so does
        a short prompt that comes while it runs.
        """
        lengths = list(decoding)
        if not num_prompts or self.times is None:
            return PromptBudget(None, 0.0, 0, 0)
        share, decoding_s, sampling_s = 1.0, 0.0, 0.0
        if lengths:
            share = max(self.prefill_share, PROMPT_WEIGHT * num_prompts / len(lengths))
            decoding_s, sampling_s = self.times.decoding_s(len(lengths), 0), self.times.sampling_s(len(lengths))
        left_s = decoding_s - sampling_s + (share if share < 1 else LONGEST_STEPS) * self.times.longest_s
        return PromptBudget(self.times, left_s, len(lengths), 0, sampling_s)


@dataclass(slots=True)
class PromptBudget:
    """The part of one step that is left for prompts."""

    times: StepTimes | None  # None: no limit
    left_s: float  # for the prompts' attention and the bucket's tokens
    num_tokens: int  # in the step so far
    num_prompt_tokens: int  # prompt tokens among them
    sampling_s: float = 0.0  # taken by the rows of decoding sequences, already deducted from `left_s`
    num_free_rows: int = 0  # head rows left for prompt tokens to score

    def tokens(self, context: int, *, are_scored: bool = False) -> int | None:
        """Returns how many tokens of a prompt with `context` computed tokens may join, or None for no limit.

        If they are scored, each takes a row of the head.
        """
        if self.times is None:
            return None
        count = MIN_CHUNK - self.num_prompt_tokens
        pair_s = context * self.times.pair_s
        for bucket, bucket_s in sorted(self.times.prompt_s.items()):
            free_s = self.left_s - bucket_s
            if are_scored:
                free_s -= self.times.sampling_s(bucket) - self.sampling_s
            if bucket > self.num_tokens and free_s >= 0:
                count = max(count, min(bucket - self.num_tokens, int(free_s / pair_s) if pair_s else bucket))
        return max(0, count)

    @contextmanager
    def reserved(self, count: int, context: int) -> Iterator[None]:
        """Keeps back, within the block, the time that attention takes for `count` tokens after `context` others."""
        seconds = 0.0 if self.times is None else count * context * self.times.pair_s
        self.left_s -= seconds
        try:
            yield
        finally:
            self.left_s += seconds

    def take(self, count: int, context: int) -> None:
        self.num_tokens += count
        self.num_prompt_tokens += count
        if self.times is not None:
            self.left_s -= count * context * self.times.pair_s


def _bucket(seconds: Mapping[int, float], count: int) -> int:
    return min((bucket for bucket in seconds if bucket >= count), default=max(seconds))

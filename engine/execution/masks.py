"""What the replies of a step may continue with: one mask of tokens per row that a grammar constrains."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from llguidance import LLExecutor

from penstock.engine.scheduling.scheduler import Row, StepPlan
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.structured import GrammarFailed, Matcher


class MaskBuilder:
    """Fills the masks of plans, and follows the replies that need them through their grammars.

    A matcher follows from its sequence's tokens: it stays where it is while the sequence is preempted or recomputed,
    and for a resumed one it begins with the tokens of the earlier run.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._num_words = _words(vocab_size)
        # Where no token ends a reply, llguidance has one more than the vocabulary, which does.
        self._num_filled = _words(vocab_size if eos_token_ids else vocab_size + 1)
        self._eos_token_ids = eos_token_ids
        self._matchers: dict[Sequence, Matcher] = {}
        self._ended: list[tuple[Sequence, GrammarFailed | None]] = []

    def build(self, plan: StepPlan, newest: Mapping[Sequence, int]) -> np.ndarray:
        """i32 `[num_sampled, words]`, a bit per token, set if it may be drawn; all are for a row without a grammar.

        `newest` has the token of each sequence that the host has read, and has not committed yet. One that ended with
        it, or ends here (`take_ended`), has all bits set: what it draws is discarded.
        """
        sampled = plan.sampled
        masks = np.full((len(sampled), self._num_filled), -1, np.int32)
        filled = [
            (place, row.sequence, matcher)
            for place, row in enumerate(sampled)
            if row.sequence.is_constrained and (matcher := self._advanced(row, newest)) is not None
        ]
        if filled:
            self._fill(masks, [(matcher, place) for place, _, matcher in filled])
        for place, sequence, matcher in filled:
            if matcher.has_failed:
                self._ended.append((sequence, matcher.failure()))
                masks[place] = -1
        return np.ascontiguousarray(masks[:, : self._num_words])

    def take_ended(self) -> list[tuple[Sequence, GrammarFailed | None]]:
        """The sequences that grammars have ended since it was last asked: by a failure, or because nothing can follow
        and no token says so.
        """
        ended, self._ended = self._ended, []
        return ended

    def forget(self, sequence: Sequence) -> None:
        self._matchers.pop(sequence, None)

    def _advanced(self, row: Row, newest: Mapping[Sequence, int]) -> Matcher | None:
        """A row's matcher, behind all tokens of its sequence; None if nothing follows them."""
        sequence = row.sequence
        matcher = self._matcher(sequence)
        new = sequence.token_ids[sequence.num_prompt + matcher.num_tokens :]
        if sequence in newest:
            new.append(newest[sequence])
        if new and (new[-1] < 0 or new[-1] in sequence.request.sampling.stop_ids(self._eos_token_ids)):
            return None
        try:
            matcher.advance(new)
        except GrammarFailed as error:
            self._ended.append((sequence, error))
            return None
        if matcher.is_complete:
            self._ended.append((sequence, None))
            return None
        return matcher

    def _matcher(self, sequence: Sequence) -> Matcher:
        matcher = self._matchers.get(sequence)
        if matcher is None:
            grammar, sampling = sequence.request.grammar, sequence.request.sampling
            assert grammar is not None  # noqa: S101  a constrained sequence
            matcher = self._matchers[sequence] = grammar.matcher(sampling.bad_token_ids)
        return matcher

    def _fill(self, masks: np.ndarray, matchers: list[tuple[Matcher, int]]) -> None:
        states = [(matcher.state, place) for matcher, place in matchers]
        self._executor.unsafe_compute_mask_ptr(states, masks.ctypes.data, masks.strides[0], len(masks))

    @cached_property
    def _executor(self) -> LLExecutor:
        """Threads for the masks of a step, once there is one that needs them."""
        return LLExecutor()


def _words(num_tokens: int) -> int:
    return -(-num_tokens // 32)

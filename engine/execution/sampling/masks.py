"""Masks of the tokens that replies may continue with: one per grammar-constrained row of a step."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from functools import cached_property
from itertools import accumulate

import numpy as np
from llguidance import LLExecutor, LLMatcher

from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.step_plan import Row, StepPlan
from penstock.engine.structured import GrammarFailed, Matcher


class MaskBuilder:
    """Fills the masks of plans, and follows the replies that need them through their grammars.

    A matcher follows from its sequence's tokens. It keeps its position while the sequence is preempted or recomputed,
    and for a resumed sequence it begins with the tokens of the earlier run.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._num_words = _words(vocab_size)
        # If no token ends a reply, llguidance adds one after the vocabulary that does.
        has_end = any(id_ < vocab_size for id_ in eos_token_ids)
        self._num_filled = _words(vocab_size if has_end else vocab_size + 1)
        self._eos_token_ids = eos_token_ids
        self._matchers: dict[Sequence, Matcher] = {}
        self._ended: list[tuple[Sequence, GrammarFailed | None]] = []

    def build(self, plan: StepPlan, newest: Mapping[Sequence, int]) -> np.ndarray:
        """Returns i32 `[num_drawn, words]`, a bit per token that may be drawn; all are set in rows without a grammar.

        `newest` has the token of each sequence that the host has read and not committed yet. A sequence that ended with
        it, or ends here (`take_ended`), has all bits set: what it draws is discarded.
        """
        rows, places = plan.sampled, [0, *accumulate(row.num_drawn for row in plan.sampled)]
        masks = np.full((places[-1], self._num_filled), -1, np.int32)
        matchers = [
            (matcher, place)
            for row, place in zip(rows, places, strict=False)
            if row.sequence.is_constrained and (matcher := self._behind(row.sequence, newest)) is not None
        ]
        if matchers:
            self._fill(masks, matchers)
        of_place = dict(zip(places, rows, strict=False))
        for matcher, place in matchers:
            row = of_place[place]
            if matcher.has_failed:
                self._fill_again(masks, place, row.sequence, newest)
            if row.drafts:
                self._fill_behind(masks, place, row)
        return np.ascontiguousarray(masks[:, : self._num_words])

    def _fill_behind(self, masks: np.ndarray, place: int, row: Row) -> None:
        """Fills the masks after a row's drafts.

        If the grammar rejects a draft or fails at it, nothing may be drawn from there on. The row that gets there
        without drafts then finds out why.
        """
        masks[place + 1 : place + row.num_drawn] = 0
        matcher = self._matchers[row.sequence]
        if not matcher.may_guess:  # the reply has switched to another lexer since planning
            return
        state = matcher.state.deep_copy()
        for behind, draft in enumerate(row.drafts, place + 1):
            if not state.consume_token(draft) or state.is_stopped():
                return
            self._executor.unsafe_compute_mask_ptr([(state, behind)], masks.ctypes.data, masks.strides[0], len(masks))
            if state.is_error():
                masks[behind] = 0
                return

    def forced(self, sequence: Sequence) -> list[int]:
        """Returns the tokens that a sequence's grammar forces, by the bytes that have to come next."""
        state = self._guessing(sequence)
        return [] if state is None else list(state.compute_ff_tokens())

    def count_allowed(self, sequence: Sequence, drafts: Tokens[int]) -> int:
        """Returns how many of these drafts a sequence's grammar lets follow."""
        state = self._guessing(sequence)
        return 0 if state is None else int(state.validate_tokens(list(drafts)))

    def _guessing(self, sequence: Sequence) -> LLMatcher | None:
        """Returns a copy of a sequence's matcher, after its tokens, for text that may never come.

        Returns None if nothing follows, or if the reply has a lexer of its own. That one must not see other text, or
        guesses would decide when it is full.
        """
        matcher = self._behind(sequence, {})
        return matcher.state.deep_copy() if matcher is not None and matcher.may_guess else None

    def take_ended(self) -> list[tuple[Sequence, GrammarFailed | None]]:
        """Takes the sequences that grammars ended, by a failure or because nothing can follow and no token says so."""
        ended, self._ended = self._ended, []
        return ended

    def forget(self, sequence: Sequence) -> None:
        self._matchers.pop(sequence, None)

    def _behind(self, sequence: Sequence, newest: Mapping[Sequence, int]) -> Matcher | None:
        """Returns a sequence's matcher, after all of its tokens; None if nothing follows them."""
        try:
            return self._advanced(sequence, newest)
        except GrammarFailed as failure:
            return self._renewed(sequence, newest, failure)

    def _advanced(self, sequence: Sequence, newest: Mapping[Sequence, int]) -> Matcher | None:
        matcher = self._matchers.get(sequence) or self._new_matcher(sequence)
        new = sequence.token_ids[sequence.num_prompt + matcher.num_tokens :]
        if sequence in newest:
            new.append(newest[sequence])
        if new and (new[-1] < 0 or new[-1] in sequence.request.sampling.stop_ids(self._eos_token_ids)):
            return None
        matcher.advance(new)
        if matcher.is_complete:
            self._ended.append((sequence, None))
            return None
        return matcher

    def _renewed(self, sequence: Sequence, newest: Mapping[Sequence, int], failure: GrammarFailed) -> Matcher | None:
        """Replaces a sequence's failed matcher; returns None if the sequence ends with the failure."""
        grammar = sequence.request.grammar
        while grammar is not None and (matcher := grammar.instead_of(self._matchers[sequence])) is not None:
            self._matchers[sequence] = matcher
            try:
                return self._advanced(sequence, newest)
            except GrammarFailed as error:
                failure = error
        self._ended.append((sequence, failure))
        return None

    def _new_matcher(self, sequence: Sequence) -> Matcher:
        grammar = sequence.request.grammar
        assert grammar is not None  # noqa: S101  a constrained sequence
        matcher = self._matchers[sequence] = grammar.matcher(sequence.request.sampling.bad_token_ids)
        return matcher

    def _fill(self, masks: np.ndarray, matchers: list[tuple[Matcher, int]]) -> None:
        states = [(matcher.state, place) for matcher, place in matchers]
        self._executor.unsafe_compute_mask_ptr(states, masks.ctypes.data, masks.strides[0], len(masks))

    def _fill_again(self, masks: np.ndarray, place: int, sequence: Sequence, newest: Mapping[Sequence, int]) -> None:
        """Fills the mask of a row again after its matcher failed."""
        while (matcher := self._renewed(sequence, newest, self._matchers[sequence].failure())) is not None:
            self._fill(masks, [(matcher, place)])
            if not matcher.has_failed:
                return
        masks[place] = -1

    @cached_property
    def _executor(self) -> LLExecutor:
        """Threads that compute a step's masks, created on first use."""
        return LLExecutor()


def _words(num_tokens: int) -> int:
    return -(-num_tokens // 32)

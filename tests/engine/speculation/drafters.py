"""Drafters for tests, whose drafts are known beforehand, right or wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.speculation.drafter import Draft


@dataclass
class TrueContinuation:
    """Knows how each choice of each request continues, and drafts each token right with this probability."""

    replies: Mapping[tuple[str, int], list[int]]  # by id and index, from the first generated token on
    acceptance: float = 1.0
    forgotten: list[Sequence] = field(default_factory=list)

    def draft(self, sequence: Sequence, limit: int) -> Draft:
        start = len(sequence.token_ids) - sequence.num_prompt
        reply = self.replies.get((sequence.request.id, sequence.index), [])
        tokens = reply[start : start + limit]
        return Draft(tuple(self._drafted(token, start + i) for i, token in enumerate(tokens)))

    def _drafted(self, token: int, position: int) -> int:
        return token if Random(position).random() < self.acceptance else token ^ 1

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)


@dataclass
class Says:
    """Drafts whatever a function of the sequence returns."""

    function: Callable[[Sequence], tuple[int, ...]]

    def draft(self, sequence: Sequence, limit: int) -> Draft:
        return Draft(self.function(sequence))

    def forget(self, sequence: Sequence) -> None:
        """Does nothing, as nothing is remembered."""

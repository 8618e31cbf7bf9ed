"""Who guesses how a sequence goes on."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from penstock.engine.scheduling.sequence import Sequence


class Draft(NamedTuple):
    """A guess at a sequence's next tokens."""

    token_ids: tuple[int, ...] = ()
    kind: int = 0
    """How it was found. How often drafts turn out right is followed for each kind on its own."""


class Drafter(Protocol):
    """Whatever it says, the tokens are the same: how soon they come is all that depends on it.

    It is asked at every step, also where its draft is not used: that is how it is known when drafts pay. So an answer
    should take microseconds. One that runs a model would do so for all sequences of a step at once, when it is told of
    the step by a method beside these, and answer from what it has.
    """

    def draft(self, sequence: Sequence, limit: int) -> Draft:
        """What may follow the tokens of `sequence` that the host knows, `limit` tokens at most."""

    def forget(self, sequence: Sequence) -> None:
        """It has ended, or never was here."""

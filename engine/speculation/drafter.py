"""Interface of drafters, which guess how a sequence continues."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from penstock.engine.scheduling.sequence import Sequence


class Draft(NamedTuple):
    token_ids: tuple[int, ...] = ()
    kind: int = 0
    """How the draft was found. The acceptance of each kind is tracked separately."""


class Drafter(Protocol):
    """Guesses tokens. A drafter affects only how soon tokens come, not which ones.

    It is called at every step, even if its draft is not used, to learn when drafts pay. So it should answer within
    microseconds. A drafter that runs a model would do so for all sequences of a step at once, when a further method
    tells it of the step, and answer here from the result.
    """

    def draft(self, sequence: Sequence, limit: int) -> Draft:
        """Returns a guess at what follows the tokens of `sequence` that the host knows, at most `limit` tokens."""

    def forget(self, sequence: Sequence) -> None:
        """Drops a sequence, which has ended or was never known."""

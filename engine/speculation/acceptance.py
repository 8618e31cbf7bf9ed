"""Tracks how often drafts turn out right."""

from __future__ import annotations

from collections.abc import Sequence

_MEMORY = 32  # drafted tokens after which older ones count half
_TRUST = 4.0  # weight of the prior, in drafted tokens
_AT_FIRST = 0.5


class Acceptance:
    """The share of right tokens among the drafted ones before which all were right. The newest count most."""

    __slots__ = ("_before", "_right", "_tried")

    def __init__(self, before: Acceptance | None = None) -> None:
        """Starts without observations. `before` is the prior."""
        self._before = before
        self._right = self._tried = 0.0

    @property
    def chance(self) -> float:
        """Probability that the next drafted token is right."""
        before = _AT_FIRST if self._before is None else self._before.chance
        return (self._right + before * _TRUST) / (self._tried + _TRUST)

    def note(self, num_right: int, num_tried: int) -> None:
        self._right += num_right
        self._tried += num_tried
        if self._tried > _MEMORY:
            self._right, self._tried = self._right / 2, self._tried / 2
        if self._before is not None:
            self._before.note(num_right, num_tried)


def count_right(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns how many of the first tokens were drafted right."""
    count = 0
    for draft, token in zip(drafts, tokens, strict=False):
        if draft != token:
            break
        count += 1
    return count

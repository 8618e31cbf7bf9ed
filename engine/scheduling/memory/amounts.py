"""Numbers of pages by kind."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add, le, sub
from typing import Self


@dataclass(frozen=True, slots=True)
class Amount:
    """Numbers of pages by kind. Operands must have the same number of kinds; an empty amount counts as zero of each."""

    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, *counts: int) -> Self:
        return cls(counts)

    @property
    def total(self) -> int:
        return sum(self.counts)

    def __add__(self, other: Amount) -> Amount:
        if not self.counts or not other.counts:
            return self if self.counts else other
        return Amount(tuple(map(add, self.counts, other.counts)))

    def __sub__(self, other: Amount) -> Amount:
        return Amount(tuple(map(sub, self.counts, other.counts))) if other.counts else self

    def __bool__(self) -> bool:
        return any(self.counts)

    def fits(self, there: Amount) -> bool:
        """Whether this amount is available in `there`, for every kind."""
        return all(map(le, self.counts, there.counts))

    def at_least(self, count: int) -> Amount:
        """Returns the amount with each kind raised to at least `count`."""
        return Amount(tuple(max(count, own) for own in self.counts))

    def most(self, other: Amount) -> Amount:
        """Returns the maximum of both, kind by kind."""
        return Amount(tuple(map(max, self.counts, other.counts)))


NOTHING = Amount()

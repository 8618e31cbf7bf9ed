"""How many pages there are, or are needed, of each kind."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add, le, sub
from typing import Self


@dataclass(frozen=True, slots=True)
class Amount:
    """Pages by kind. Two that are added, subtracted or compared are of as many kinds; an empty one counts as none of
    any.
    """

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
        """Whether so many are `there`, of every kind."""
        return all(map(le, self.counts, there.counts))

    def at_least(self, count: int) -> Amount:
        """With so many of each kind where there would be fewer."""
        return Amount(tuple(max(count, own) for own in self.counts))

    def most(self, other: Amount) -> Amount:
        """The larger of both, kind by kind."""
        return Amount(tuple(map(max, self.counts, other.counts)))


NOTHING = Amount()

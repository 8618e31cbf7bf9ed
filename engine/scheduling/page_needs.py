"""How many pages a sequence needs, where some layers see a window and others everything before a token.

Layers are in groups. A page belongs to one group of one sequence, and holds some consecutive tokens in all layers of
that group; the pages of a group with a window are given back once no token still to be computed sees them. Groups whose
layers have other KV heads have pages of another kind, of which there is another number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.engine.scheduling.amounts import Amount


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """Of sequences whose layers have these windows, one per group; None for a group that sees everything."""

    page_size: int
    windows: tuple[int | None, ...] = (None,)
    kinds: tuple[int, ...] = (0,)  # of the pages of each group

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def num_kinds(self) -> int:
        return max(self.kinds) + 1

    @property
    def has_windows(self) -> bool:
        return any(window is not None for window in self.windows)

    @property
    def bounded_kinds(self) -> frozenset[int]:
        """Those of which a sequence holds no more than its windows reach over, however long it is."""
        return frozenset(range(self.num_kinds)) - {self.kinds[group] for group in self.groups_without_window}

    @property
    def groups_without_window(self) -> tuple[int, ...]:
        return tuple(group for group, window in enumerate(self.windows) if window is None)

    def by_kind(self, counts: Iterable[int]) -> Amount:
        """Of so many pages for each group."""
        found = [0] * self.num_kinds
        for kind, count in zip(self.kinds, counts, strict=True):
            found[kind] += count
        return Amount(tuple(found))

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill, in each group."""
        return -(-num_tokens // self.page_size)

    def first_seen(self, group: int, position: int) -> int:
        """Which of a sequence's pages is the first that a token at `position`, or a later one, sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.page_size

    def held(self, num_tokens: int, chunk: int) -> Amount:
        """Pages that a sequence holds at once, at most and in all groups, until it has `num_tokens` tokens, of which a
        step computes `chunk` at most.
        """
        pages = self.pages_for(num_tokens)
        return self.by_kind(
            pages if window is None else min(pages, self._touched(window - 1 + chunk)) for window in self.windows
        )

    def most(self, num_tokens: int, chunk: int) -> int:
        """As `held`, of all kinds together."""
        return self.held(num_tokens, chunk).total

    def longest(self, pages: Amount, at_most: int) -> int:
        """Tokens that a sequence can always get to in so many pages, if it has them all; `at_most` that many."""
        return bisect_left(range(1, at_most + 1), True, key=lambda num_tokens: not self.held(num_tokens, 1).fits(pages))

    def sequences(self, pages: Amount, num_tokens: int) -> int:
        """Decoding ones of that length that so many pages are enough for."""
        return min(there // held for there, held in zip(pages.counts, self.held(num_tokens, 1).counts, strict=True))

    def spans(self, pages: Amount) -> int:
        """Tokens, in page lengths, that so many pages hold together, while no window has passed any. Kinds that
        windows bound are left out, if there are others.
        """
        groups = self.by_kind([1] * self.num_groups).counts
        bounded = self.bounded_kinds if len(self.bounded_kinds) < self.num_kinds else frozenset()
        return min(pages.counts[kind] // groups[kind] for kind in range(self.num_kinds) if kind not in bounded)

    def _touched(self, num_tokens: int) -> int:
        """Pages of which `num_tokens` consecutive tokens, wherever they begin, lie in some, at most."""
        return (num_tokens + 2 * self.page_size - 2) // self.page_size

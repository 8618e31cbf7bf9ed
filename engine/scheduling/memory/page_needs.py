"""How many pages a sequence needs, if some layers have a sliding window and others full attention.

Layers are in groups. A page belongs to one group of one sequence and holds some consecutive tokens in all layers of
that group. The pages of a group with a window are released once no token still to be computed sees them. Groups whose
layers have different KV heads have pages of another kind, with a page count of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.engine.scheduling.memory.amounts import Amount


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """Page needs of sequences whose layer groups have these windows; None stands for full attention."""

    page_size: int
    windows: tuple[int | None, ...] = (None,)
    kinds: tuple[int, ...] = (0,)  # kind of each group's pages

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
        """Kinds of which a sequence never holds more than its windows span, however long it is."""
        return frozenset(range(self.num_kinds)) - {self.kinds[group] for group in self.groups_without_window}

    @property
    def groups_without_window(self) -> tuple[int, ...]:
        return tuple(group for group, window in enumerate(self.windows) if window is None)

    def by_kind(self, counts: Iterable[int]) -> Amount:
        """Sums page counts by group into an amount by kind."""
        found = [0] * self.num_kinds
        for kind, count in zip(self.kinds, counts, strict=True):
            found[kind] += count
        return Amount(tuple(found))

    def pages_for(self, num_tokens: int) -> int:
        """Returns the number of pages that `num_tokens` tokens fill, in each group."""
        return -(-num_tokens // self.page_size)

    def first_seen(self, group: int, position: int) -> int:
        """Returns the index of a sequence's first page that a token at `position`, or a later one, sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.page_size

    def held(self, num_tokens: int, chunk: int) -> Amount:
        """Returns the most pages that a sequence holds at once until it has `num_tokens` tokens, in all groups.

        A step computes at most `chunk` of its tokens.
        """
        pages = self.pages_for(num_tokens)
        return self.by_kind(
            pages if window is None else min(pages, self._touched(window - 1 + chunk)) for window in self.windows
        )

    def most(self, num_tokens: int, chunk: int) -> int:
        """Returns the total of `held` over all kinds."""
        return self.held(num_tokens, chunk).total

    def longest(self, pages: Amount, at_most: int) -> int:
        """Returns the length, up to `at_most`, that a sequence can always reach if it has all `pages`."""
        return bisect_left(range(1, at_most + 1), True, key=lambda num_tokens: not self.held(num_tokens, 1).fits(pages))

    def sequences(self, pages: Amount, num_tokens: int) -> int:
        """Returns how many decoding sequences of that length `pages` are enough for."""
        return min(there // held for there, held in zip(pages.counts, self.held(num_tokens, 1).counts, strict=True))

    def spans(self, pages: Amount) -> int:
        """Returns how many tokens, counted in pages, `pages` hold while no window has moved past any.

        Kinds bounded by windows are left out if there are others.
        """
        groups = self.by_kind([1] * self.num_groups).counts
        bounded = self.bounded_kinds if len(self.bounded_kinds) < self.num_kinds else frozenset()
        return min(pages.counts[kind] // groups[kind] for kind in range(self.num_kinds) if kind not in bounded)

    def _touched(self, num_tokens: int) -> int:
        """Returns the most pages that `num_tokens` consecutive tokens touch, wherever they begin."""
        return (num_tokens + 2 * self.page_size - 2) // self.page_size

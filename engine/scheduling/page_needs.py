"""How many pages a sequence needs, where some layers see a window and others everything before a token.

Layers are in groups. A page belongs to one group of one sequence, and holds some consecutive tokens in all layers of
that group; the pages of a group with a window are given back once no token still to be computed sees them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """Of sequences whose layers have these windows, one per group; None for a group that sees everything."""

    page_size: int
    windows: tuple[int | None, ...] = (None,)

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def has_windows(self) -> bool:
        return any(window is not None for window in self.windows)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill, in each group."""
        return -(-num_tokens // self.page_size)

    def first_seen(self, group: int, position: int) -> int:
        """Which of a sequence's pages is the first that a token at `position`, or a later one, sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.page_size

    def most(self, num_tokens: int, chunk: int) -> int:
        """Pages that a sequence holds at once, at most and in all groups, until it has `num_tokens` tokens, of which a
        step computes `chunk` at most.
        """
        pages = self.pages_for(num_tokens)
        return sum(
            pages if window is None else min(pages, self._touched(window - 1 + chunk)) for window in self.windows
        )

    def longest(self, num_pages: int, at_most: int) -> int:
        """Tokens that a sequence can always get to in so many pages, if it has them all; `at_most` that many."""
        return bisect_right(range(1, at_most + 1), num_pages, key=lambda num_tokens: self.most(num_tokens, 1))

    def _touched(self, num_tokens: int) -> int:
        """Pages of which `num_tokens` consecutive tokens, wherever they begin, lie in some, at most."""
        return (num_tokens + 2 * self.page_size - 2) // self.page_size

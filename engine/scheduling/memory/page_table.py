"""The pages that one sequence holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class PageTable:
    """A list of pages for each layer group: entry i holds the sequence's tokens of page i.

    All lists have the same length, `num_places`. Entries that a group's window has moved past are page 0, the sink,
    which nobody owns.
    """

    __slots__ = ("groups", "num_passed", "num_places")

    def __init__(self, groups: Sequence[list[int]] = ()) -> None:
        """Starts with the pages of a prefix, as `PagePool.find_prefix` returns them."""
        self.groups = groups
        self.num_passed = [next((i for i, page in enumerate(pages) if page), len(pages)) for pages in groups]
        self.num_places = len(groups[0]) if groups else 0

    def __len__(self) -> int:
        return self.num_places

    def held_by(self, groups: Iterable[int]) -> Iterator[int]:
        """Yields the pages that these groups hold, place by place, so that all lose a prefix's tail before its head."""
        for place in zip(*(self.groups[group] for group in groups), strict=True):
            yield from filter(None, place)

    @property
    def num_held(self) -> list[int]:
        """Number of held pages by group."""
        return [self.num_places - passed for passed in self.num_passed]

    def extend(self, pages: Sequence[list[int]]) -> None:
        """Appends places: `pages` has the same number for each group."""
        for held, more in zip(self.groups, pages, strict=True):
            held.extend(more)
        self.num_places += len(pages[0])

    def pass_by(self, group: int, end: int) -> list[int]:
        """Removes and returns the pages of a group's places before `end`."""
        held, start = self.groups[group], self.num_passed[group]
        passed = held[start:end]
        held[start:end] = [0] * len(passed)
        self.num_passed[group] = start + len(passed)
        return passed

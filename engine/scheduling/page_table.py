"""The pages that one sequence holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class PageTable:
    """A list of pages for each group of layers: page i of a list holds page i of the sequence's tokens.

    All lists are of one length, `num_places`. Of the first places, those whose pages its window has passed, a group has
    page 0, the sink, which is nobody's.
    """

    __slots__ = ("groups", "num_passed", "num_places")

    def __init__(self, groups: Sequence[list[int]] = ()) -> None:
        """With the pages of a prefix, as `PagePool.find_prefix` found them."""
        self.groups = groups
        self.num_passed = [next((i for i, page in enumerate(pages) if page), len(pages)) for pages in groups]
        self.num_places = len(groups[0]) if groups else 0

    def __len__(self) -> int:
        return self.num_places

    def __iter__(self) -> Iterator[int]:
        """The pages that are held, place by place, so that all groups lose the tails of a prefix before its head."""
        for place in zip(*self.groups, strict=True):
            yield from filter(None, place)

    @property
    def num_held(self) -> int:
        return self.num_places * len(self.groups) - sum(self.num_passed)

    def extend(self, pages: list[int]) -> None:
        """Adds places: `pages` has one for each of them, group by group."""
        count = len(pages) // len(self.groups)
        for group, held in enumerate(self.groups):
            held.extend(pages[group * count : (group + 1) * count])
        self.num_places += count

    def pass_by(self, group: int, end: int) -> list[int]:
        """Takes the pages of a group's places before `end` out of it."""
        held, start = self.groups[group], self.num_passed[group]
        passed = held[start:end]
        held[start:end] = [0] * len(passed)
        self.num_passed[group] = start + len(passed)
        return passed

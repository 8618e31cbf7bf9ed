"""The recurrent states that one sequence holds, and those that a row of a step reads and writes."""

from __future__ import annotations

from typing import NamedTuple


class StateTable:
    """Which slot has the state behind how many of a sequence's tokens.

    While it runs, a sequence holds the state behind its `num_computed` tokens: the next step begins with that. It may
    hold others: behind fewer tokens, those that are to be indexed once all of these are known; behind more, one for
    each draft that is being verified.
    """

    __slots__ = ("held", "marks", "source")

    def __init__(self) -> None:
        self.held: dict[int, int] = {}  # number of tokens -> slot
        self.source = 0  # the slot that its first step reads, of a prefix that was found; 0: none, or no more
        self.marks: frozenset[int] = frozenset()  # numbers of pages behind which its state is worth keeping

    @property
    def slots(self) -> list[int]:
        """All that it has a reference to."""
        return [*self.held.values(), *([self.source] if self.source else [])]


class RowStates(NamedTuple):
    """What a row begins with, and where what it gets to is kept.

    In one step no slot is read by one row and written by another, nor written by two.
    """

    read: int = 0  # the slot that has the state before its first token; at position 0 that state is zero
    writes: tuple[tuple[int, int], ...] = ()  # behind so many of its tokens, ascending: the slot that is written

    @property
    def last(self) -> int:
        return self.writes[-1][1] if self.writes else 0


NO_STATES = RowStates()

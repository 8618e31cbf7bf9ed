"""The recurrent states that one sequence holds, and those that a row of a step reads and writes."""

from __future__ import annotations

from typing import NamedTuple


class StateTable:
    """Maps numbers of a sequence's tokens to the slots with the state after them.

    A running sequence holds the state after its `num_computed` tokens: the next step begins with it. It may hold states
    after fewer tokens, to be indexed once all of these are known, and after more, one for each draft being verified.
    """

    __slots__ = ("held", "marks", "source")

    def __init__(self) -> None:
        self.held: dict[int, int] = {}  # number of tokens -> slot
        self.source = 0  # slot of a found prefix, read by the first step; 0: none, or already read
        self.marks: frozenset[int] = frozenset()  # page counts after which its state is worth keeping

    @property
    def slots(self) -> list[int]:
        """All slots that it has a reference to."""
        return [*self.held.values(), *([self.source] if self.source else [])]


class RowStates(NamedTuple):
    """The state that a row starts from, and where the states that it reaches are kept.

    Within one step, no slot is read by one row and written by another, nor written by two.
    """

    read: int = 0  # slot with the state before its first token; at position 0 that state is zero
    writes: tuple[tuple[int, int], ...] = ()  # (number of its tokens, slot written after them), ascending

    @property
    def last(self) -> int:
        return self.writes[-1][1] if self.writes else 0


NO_STATES = RowStates()

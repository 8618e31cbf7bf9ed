"""Rows of a stored weight: those of one parameter of several in a tensor, and those that a parameter holds twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class Rows:
    """Which of a fused tensor's rows a parameter is: from `first` on runs of `run`, each `step` behind the one before.

    As long as a run is a step, they stand together; else parameters take turns, by heads or row by row.
    """

    first: int
    total: int
    step: int = 1
    run: int = 1
    axis: int = -1  # of the parameter

    @classmethod
    def of(cls, sizes: Sequence[int], place: int, turns: int, axis: int = -1) -> Rows:
        """Of the parameter at `place` among parameters of these sizes."""
        if turns == 1:
            return cls(sum(sizes[:place]), sum(sizes), axis=axis)
        runs = [size // turns for size in sizes]
        return cls(sum(runs[:place]), sum(sizes), sum(runs), runs[place], axis)

    def stored(self, part: slice) -> tuple[slice, np.ndarray | None]:
        """What to read for the rows `part` of the parameter, and which of what is read they are; None: all."""
        numbers = np.arange(part.start, part.stop)
        if not numbers.size:
            return slice(self.first, self.first), None
        places = self.first + numbers // self.run * self.step + numbers % self.run
        first, end = int(places[0]), int(places[-1]) + 1
        return slice(first, end), None if end - first == numbers.size else places - first

    def in_blocks(self, size: int) -> Rows | None:
        """The same counted in blocks of so many rows; None where a block has rows of several parameters."""
        if self.run == self.step:
            return None if self.first % size else replace(self, first=self.first // size)
        if any(number % size for number in (self.first, self.run, self.step)):
            return None
        return replace(self, first=self.first // size, step=self.step // size, run=self.run // size)


def before_copying(part: slice, size: int, copies: int, head_dim: int) -> tuple[slice, slice]:
    """What to read so that, with each head `copies` times, it holds `part` of `size`; and where in that it then is."""
    start, stop, _ = part.indices(size)
    width = copies * head_dim  # of all copies of one stored head
    first, end = start // width, -(-stop // width)
    stored = slice(first * head_dim, end * head_dim)
    return stored, slice(start - first * width, stop - first * width)

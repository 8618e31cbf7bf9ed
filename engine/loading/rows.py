"""Rows of a stored weight: those of one parameter in a fused tensor, and those that a parameter holds in copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class FusedRows:
    """The rows of a fused tensor that belong to one parameter: runs of `run` rows from `first` on, one every `step`
    rows.

    If a run is as long as a step, the rows are contiguous; otherwise parameters alternate, by heads or row by row.
    """

    first: int
    total: int
    step: int = 1
    run: int = 1
    axis: int = -1  # of the parameter

    @classmethod
    def of(cls, sizes: Sequence[int], place: int, turns: int, axis: int = -1) -> FusedRows:
        """Returns the rows of the parameter at `place` among parameters of these sizes."""
        if turns == 1:
            return cls(sum(sizes[:place]), sum(sizes), axis=axis)
        runs = [size // turns for size in sizes]
        return cls(sum(runs[:place]), sum(sizes), sum(runs), runs[place], axis)

    def stored(self, part: slice) -> tuple[slice, np.ndarray | None]:
        """Returns what to read for the rows `part` of the parameter, and which of the rows read belong to it; None:
        all.
        """
        numbers = np.arange(part.start, part.stop)
        if not numbers.size:
            return slice(self.first, self.first), None
        places = self.first + numbers // self.run * self.step + numbers % self.run
        first, end = int(places[0]), int(places[-1]) + 1
        return slice(first, end), None if end - first == numbers.size else places - first

    def counted_in_blocks(self, size: int) -> FusedRows | None:
        """Returns the same rows counted in blocks of `size` rows; None if a block has rows of several parameters."""
        if self.run == self.step:
            return None if self.first % size else replace(self, first=self.first // size)
        if any(number % size for number in (self.first, self.run, self.step)):
            return None
        return replace(self, first=self.first // size, step=self.step // size, run=self.run // size)


def stored_part(part: slice, size: int, copies: int, head_dim: int) -> tuple[slice, slice]:
    """Returns what to read so that, with each head repeated `copies` times, it holds `part` of `size`; and the place of
    `part` in that.
    """
    start, stop, _ = part.indices(size)
    width = copies * head_dim  # rows of all copies of one stored head
    first, end = start // width, -(-stop // width)
    stored = slice(first * head_dim, end * head_dim)
    return stored, slice(start - first * width, stop - first * width)

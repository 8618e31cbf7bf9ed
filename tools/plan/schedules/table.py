"""The cycles of our kernels by their schedules, as `python -m benchmarks.tpu_schedules` read them.

A line is a kernel at a geometry, for a chip and a version of libtpu: cycles at some points, which are tokens of context
for attention and rows for matmuls. Between two points cycles are interpolated linearly, and after the last they go on
as between the last two. Before the first they are those of the first. `scaling.py` has the
rule for other geometries.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("table.jsonl")


@dataclass(frozen=True)
class Row:
    libtpu: str
    chip: str
    kernel: str
    geometry: Mapping[str, Any]
    bundles: int  # in the program, of the last point if each has its own
    spills: int  # in the text of the program, and likewise below
    fills: int
    transfers: int
    bounds_checks: int
    cycles: Mapping[str, float]  # at each point

    @property
    def key(self) -> str:
        """What no two rows share."""
        return json.dumps([self.libtpu, self.chip, self.kernel, self.geometry], sort_keys=True)

    def at(self, point: float | str) -> float:
        """Returns the cycles at a point, by the rule above. One that is not a number must be in the table."""
        if isinstance(point, str):
            return self.cycles[point]
        known = sorted((float(name), cycles) for name, cycles in self.cycles.items())
        places = [place for place, _ in known]
        if point <= places[0] or len(known) == 1:
            return known[0][1]
        above = min(max(1, bisect_left(places, point)), len(known) - 1)
        (low, at_low), (high, at_high) = known[above - 1], known[above]
        return at_low + (at_high - at_low) * (point - low) / (high - low)


def rows(path: Path = PATH) -> list[Row]:
    if not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def keep(more: Sequence[Row], path: Path = PATH) -> None:
    """Adds rows to the table, in the place of those with the same key."""
    kept = {row.key: row for row in [*rows(path), *more]}
    lines = [json.dumps(asdict(kept[key]), ensure_ascii=False) for key in sorted(kept)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@cache
def shipped() -> tuple[Row, ...]:
    return tuple(rows())

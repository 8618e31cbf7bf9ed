"""The cycles of a kernel at any geometry, from those that are in the table.

For a geometry in the table, its own cycles are used. For any other, some features must equal those of rows in the
table, and cycles follow the size of the work: linearly between the two nearest sizes, and in proportion beyond the
smallest and the largest. `benchmarks/results/tpu_schedules.md` compares what this rule gives for geometries that were
left out with what their schedules say.

| kernel | the same | size |
| --- | --- | --- |
| decode attention | kind of pages, head_dim | KV heads |
| prefill attention | kind of pages, head_dim | query heads |
| quantized matmul, experts | form of the weight | weights |
| delta rule | head_dim | heads of values |
| draw, adjust | | rows, in whole blocks of 8, times vocabulary |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from math import ceil
from typing import Any

from penstock.tools.plan.schedules import table
from penstock.tools.plan.schedules.table import Row

Geometry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Rule:
    same: tuple[str, ...]
    size: Callable[[Geometry], float]


def _logits(of: Geometry) -> float:
    return float(ceil(of["rows"] / 8) * 8 * of["vocab"])


def _weights(of: Geometry) -> float:
    return float(of["in"] * of["out"])


_RULES = {
    "decode attention": _Rule(("kv", "head_dim"), lambda of: of["kv_heads"]),
    "prefill attention": _Rule(("kv", "head_dim"), lambda of: of["heads"]),
    "quantized matmul": _Rule(("form",), _weights),
    "experts": _Rule(("form",), _weights),
    "delta rule": _Rule(("head_dim",), lambda of: of["value_heads"]),
    "draw": _Rule((), _logits),
    "adjust": _Rule((), _logits),
}


@dataclass(frozen=True, slots=True)
class Cycles:
    """The cycles of a kernel by the table, at any point of it."""

    rows: tuple[tuple[float, Row], ...]  # by size, each once; a single one if the geometry is in the table
    size: float
    is_exact: bool  # whether the geometry is in the table

    def at(self, point: float | str) -> float:
        known = [(size, row.at(point)) for size, row in self.rows]
        for (low, at_low), (high, at_high) in pairwise(known):
            if low <= self.size <= high:
                return at_low + (at_high - at_low) * (self.size - low) / (high - low)
        nearest, cycles = known[0] if self.size <= known[0][0] else known[-1]
        return cycles * self.size / nearest


def cycles_of(chip: str, kernel: str, geometry: Geometry, among: Iterable[Row] | None = None) -> Cycles | None:
    """Returns the cycles of a kernel on a chip with the libtpu that is installed; None if the table has none like it.

    `among` are the rows of the table; None: those that are shipped.
    """
    rule = _RULES[kernel]
    try:
        libtpu = version("libtpu")
    except PackageNotFoundError:
        return None
    shipped = table.shipped() if among is None else among
    of_kernel = [row for row in shipped if (row.libtpu, row.chip, row.kernel) == (libtpu, chip, kernel)]
    wanted, size = dict(geometry), rule.size(geometry)
    for row in of_kernel:
        if dict(row.geometry) == wanted:
            return Cycles(((size, row),), size, is_exact=True)
    alike = [row for row in of_kernel if all(row.geometry[name] == geometry[name] for name in rule.same)]
    by_size = {rule.size(row.geometry): row for row in sorted(alike, key=lambda row: max(row.cycles.values()))}
    return Cycles(tuple(sorted(by_size.items())), size, is_exact=False) if by_size else None

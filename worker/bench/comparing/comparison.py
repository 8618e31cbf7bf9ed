"""Two results, figure by figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.worker.bench.comparing.figures import STATISTICS, Figure, Sample, figures
from penstock.worker.bench.comparing.intervals import RESAMPLES, SEED, WELCH, Interval, by_requests, by_runs
from penstock.worker.bench.comparing.sameness import (
    check_comparable,
    has_same_load,
    obstacles,
    other_differences,
)
from penstock.worker.bench.result_file import Result
from penstock.worker.bench.summary import Target


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both. None: a side has no such figure, or too few values to say how sure the change is."""

    figure: Figure
    first: float | None
    second: float | None
    interval: Interval | None

    @property
    def change(self) -> float | None:
        """From the first to the second: a share of the first, or of shares the difference."""
        if self.first is None or self.second is None:
            return None
        return self.second - self.first if self.figure.kind == "share" else self.second / self.first - 1

    @property
    def verdict(self) -> Literal["better", "worse", ""]:
        """Where no change at all is outside of the interval."""
        if self.interval is None or self.interval.low <= 0 <= self.interval.high:
            return ""
        return "better" if (self.interval.low > 0) == self.figure.is_better_high else "worse"

    def is_worse_by(self, limit: float) -> bool:
        """Whether all of the interval is on the wrong side of no change, and further from it than `limit`."""
        if self.interval is None:
            return False
        return self.interval.high < -limit if self.figure.is_better_high else self.interval.low > limit


@dataclass(frozen=True, slots=True)
class Comparison:
    """`obstacles` is what they should have in common and have not; `others`, what else differs."""

    first: Result
    second: Result
    rows: tuple[Row, ...]
    unit: Literal["runs", "requests"]
    is_paired: bool
    obstacles: tuple[tuple[str, Any, Any], ...]
    others: tuple[tuple[str, Any, Any], ...]

    @property
    def method(self) -> str:
        """Where the intervals come from."""
        if self.unit == "runs":
            numbers = f"{len(self.first.recorders)} and {len(self.second.recorders)}"
            return f"95 % intervals and p: {WELCH} on {numbers} runs"
        drawn = "pairs of requests" if self.is_paired else "requests"
        return (
            f"95 % intervals: bootstrap over {drawn} of one run each ({RESAMPLES:,} resamples, seed {SEED}), which "
            "does not know how runs differ; rates have none. Measure with --repeats for that, and for p"
        )

    def worse_by(self, limit: float) -> list[Row]:
        """The figures that are worse by more than `limit`, for sure."""
        return [row for row in self.rows if row.is_worse_by(limit)]

    def to_json(self) -> dict[str, Any]:
        return {
            "first": _described(self.first),
            "second": _described(self.second),
            "obstacles": _named(self.obstacles),
            "other_differences": _named(self.others),
            "unit": self.unit,
            "paired": self.is_paired,
            "method": self.method,
            "figures": [_row_fields(row) for row in self.rows],
        }


def compare(first: Result, second: Result, *, anyway: bool = False) -> Comparison:
    """Compares all figures that both have.

    Raises:
        NotComparable: they are of another model, load or machine, and not `anyway`.
    """
    if not anyway:
        check_comparable(first, second)
    is_by_runs = min(len(first.recorders), len(second.recorders)) > 1
    is_paired = has_same_load(first, second)
    has_target = first.target == second.target != Target()
    rows = _by_runs(first, second, has_target) if is_by_runs else _by_requests(first, second, has_target, is_paired)
    return Comparison(
        first, second, tuple(row for row in rows if (row.first, row.second) != (None, None)),
        "runs" if is_by_runs else "requests", is_paired,
        tuple(obstacles(first, second)), tuple(other_differences(first, second)),
    )  # fmt: skip


def _by_runs(first: Result, second: Result, has_target: bool) -> Iterator[Row]:
    for figure in figures(has_target):
        of_first, of_second = (_of_runs(result, figure) for result in (first, second))
        if of_first is None or of_second is None:
            yield Row(figure, _mean(of_first, figure), _mean(of_second, figure), None)
        elif figure.kind == "share":
            yield Row(figure, _mean(of_first, figure), _mean(of_second, figure), by_runs(of_first, of_second))
        else:  # the change of a ratio is a difference of logarithms
            interval = by_runs(np.log(of_first).tolist(), np.log(of_second).tolist()).through(math.expm1)
            yield Row(figure, _mean(of_first, figure), _mean(of_second, figure), interval)


def _of_runs(result: Result, figure: Figure) -> list[float] | None:
    values = [figure.of_run(result, place, run) for place, run in enumerate(result.runs)]
    found = [value for value in values if value is not None]
    return found if len(found) == len(values) else None


def _mean(values: Sequence[float] | None, figure: Figure) -> float | None:
    if values is None:
        return None
    return float(np.mean(values) if figure.kind == "share" else np.exp(np.mean(np.log(values))))


def _by_requests(first: Result, second: Result, has_target: bool, is_paired: bool) -> Iterator[Row]:
    results = (first, second)
    runs = [(result, result.median, result.runs[result.median]) for result in results]
    intervals: dict[str, Interval | None] = {}
    for figure in figures(has_target):
        if figure.name not in intervals and figure.kind != "rate":
            one, other = (Sample.of(result.recorders[place], figure, result.target) for result, place, _ in runs)
            statistics = STATISTICS if figure.kind == "latency" else STATISTICS[:1]
            is_ratio = figure.kind == "latency"
            found = by_requests(one, other, statistics, is_paired=is_paired, is_ratio=is_ratio)
            names = [f"{figure.latency} {each}" for each in statistics] if figure.latency else [figure.name]
            intervals |= dict(zip(names, found, strict=True))
        values = [figure.of_run(result, place, run) for result, place, run in runs]
        yield Row(figure, values[0], values[1], intervals.get(figure.name))


def _described(result: Result) -> dict[str, Any]:
    return {
        "file": str(result.path), "title": result.title, "runs": len(result.recorders),
        "requests": len(result.recorders[0].timelines),
    }  # fmt: skip


def _named(found: Sequence[tuple[str, Any, Any]]) -> list[dict[str, Any]]:
    return [{"field": name, "first": one, "second": other} for name, one, other in found]


def _row_fields(row: Row) -> dict[str, Any]:
    interval = row.interval
    return {
        "figure": row.figure.name,
        "unit": row.figure.unit,
        "first": row.first,
        "second": row.second,
        "change": row.change,
        "is_change": "difference" if row.figure.kind == "share" else "ratio less 1",
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "p": None if interval is None else interval.p,
        "test": WELCH if interval is not None and interval.p is not None else None,
        "verdict": row.verdict or None,
    }

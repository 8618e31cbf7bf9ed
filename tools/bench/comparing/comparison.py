"""Compares two results, figure by figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.tools.bench.comparing.figures import STATISTICS, Figure, Sample, figures
from penstock.tools.bench.comparing.intervals import (
    PAIRED,
    RESAMPLES,
    SEED,
    WELCH,
    Interval,
    by_pairs,
    by_requests,
    by_runs,
)
from penstock.tools.bench.comparing.sameness import (
    has_same_load,
    obstacles,
    other_differences,
)
from penstock.tools.bench.errors import NotComparable
from penstock.tools.bench.result_file import Result
from penstock.tools.bench.summary import Target


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One figure of both sides. None: a side has none, or too few values to say how certain the change is."""

    figure: Figure
    first: float | None
    second: float | None
    interval: Interval | None

    @property
    def change(self) -> float | None:
        """The change from first to second: a ratio less 1, or for shares the difference; None: there is none."""
        if self.first is None or self.second is None:
            return None
        if self.figure.kind == "share":
            return self.second - self.first
        return self.second / self.first - 1 if self.first else None

    @property
    def verdict(self) -> Literal["better", "worse", ""]:
        """The direction of the change, if the interval excludes no change."""
        if self.interval is None or self.interval.low <= 0 <= self.interval.high:
            return ""
        return "better" if (self.interval.low > 0) == self.figure.is_better_high else "worse"

    def is_worse_by(self, limit: float) -> bool:
        """Checks whether the whole interval is on the worse side of zero, and further from it than `limit`."""
        if self.interval is None:
            return False
        return self.interval.high < -limit if self.figure.is_better_high else self.interval.low > limit


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison. `obstacles` lists what the sides should have in common but do not; `others`, all other differences.

    Of several pairs, `first` and `second` are the first. `is_paired`: requests at the same index are the same.
    """

    pairs: tuple[tuple[Result, Result], ...]
    rows: tuple[ComparisonRow, ...]
    unit: Literal["pairs", "runs", "requests"]
    is_paired: bool
    obstacles: tuple[tuple[str, Any, Any], ...]
    others: tuple[tuple[str, Any, Any], ...]

    @property
    def first(self) -> Result:
        return self.pairs[0][0]

    @property
    def second(self) -> Result:
        return self.pairs[0][1]

    @property
    def test(self) -> str | None:
        """Test behind p; None: there is none."""
        return {"pairs": PAIRED, "runs": WELCH, "requests": None}[self.unit]

    @property
    def method(self) -> str:
        """Method behind the intervals."""
        if self.unit == "pairs":
            return f"95 % intervals and p: {PAIRED} on {len(self.pairs)} pairs of files, each as measured in turn"
        if self.unit == "runs":
            numbers = f"{len(self.first.recorders)} and {len(self.second.recorders)}"
            return f"95 % intervals and p: {WELCH} on {numbers} runs"
        drawn = "pairs of requests" if self.is_paired else "requests"
        return (
            f"95 % intervals: bootstrap over {drawn} of one run each ({RESAMPLES:,} resamples, seed {SEED}), which "
            "does not know how runs differ; rates have none. Measure with --repeats for that, and for p"
        )

    def worse_by(self, limit: float) -> list[ComparisonRow]:
        """Returns the figures that are certainly worse by more than `limit`."""
        return [row for row in self.rows if row.is_worse_by(limit)]

    def to_json(self) -> dict[str, Any]:
        return {
            "pairs": [{"first": _described(first), "second": _described(second)} for first, second in self.pairs],
            "obstacles": _named(self.obstacles),
            "other_differences": _named(self.others),
            "unit": self.unit,
            "paired": self.is_paired,
            "method": self.method,
            "figures": [_row_fields(row) for row in self.rows],
        }


def compare(*pairs: tuple[Result, Result], anyway: bool = False) -> Comparison:
    """Compares all figures that both sides have, in one pair or in several that were measured in turn.

    Raises:
        NotComparable: their model, load or machine differ, and `anyway` is not set.
    """
    first, second = pairs[0]
    everyone = [result for pair in pairs for result in pair]
    in_the_way = _differences(pairs)
    if in_the_way and not anyway:
        raise NotComparable(in_the_way)
    is_paired = all(has_same_load(first, result) for result in everyone)
    has_target = first.target != Target() and all(result.target == first.target for result in everyone)
    unit: Literal["pairs", "runs", "requests"]
    if len(pairs) > 1:
        unit, rows = "pairs", _compare_pairs(pairs, has_target)
    elif min(len(first.recorders), len(second.recorders)) > 1:
        unit, rows = "runs", _compare_runs(first, second, has_target)
    else:
        unit, rows = "requests", _compare_requests(first, second, has_target, is_paired)
    return Comparison(
        pairs, tuple(row for row in rows if (row.first, row.second) != (None, None)), unit, is_paired,
        in_the_way, tuple(each for each in other_differences(first, second) if each not in in_the_way),
    )  # fmt: skip


def _differences(pairs: Sequence[tuple[Result, Result]]) -> tuple[tuple[str, Any, Any], ...]:
    """Returns what should be equal across all results, or across a side, but is not; each once."""
    first, *others = (result for pair in pairs for result in pair)
    found = [each for result in others for each in obstacles(first, result)]
    for one, *more in zip(*pairs, strict=True):
        found += [each for result in more for each in other_differences(one, result)]
    return tuple(each for place, each in enumerate(found) if each not in found[:place])


def _compare_pairs(pairs: Sequence[tuple[Result, Result]], has_target: bool) -> Iterator[ComparisonRow]:
    for figure in figures(has_target):
        of_files = [
            [_mean(_run_figures(result, figure), figure) for result in side] for side in zip(*pairs, strict=True)
        ]
        yield _tested(figure, _whole(of_files[0]), _whole(of_files[1]), by_pairs)


def _compare_runs(first: Result, second: Result, has_target: bool) -> Iterator[ComparisonRow]:
    for figure in figures(has_target):
        yield _tested(figure, _run_figures(first, figure), _run_figures(second, figure), by_runs)


def _tested(
    figure: Figure,
    first: Sequence[float] | None,
    second: Sequence[float] | None,
    by: Callable[[Sequence[float], Sequence[float]], Interval],
) -> ComparisonRow:
    interval = None
    if first is not None and second is not None:
        if figure.kind == "share":
            interval = by(first, second)
        elif min(*first, *second) > 0:  # the change of a ratio is a difference of logarithms
            interval = by(np.log(first).tolist(), np.log(second).tolist()).through(math.expm1)
    return ComparisonRow(figure, _mean(first, figure), _mean(second, figure), interval)


def _run_figures(result: Result, figure: Figure) -> list[float] | None:
    return _whole([figure.run_figure(result, place, run) for place, run in enumerate(result.runs)])


def _whole(values: Sequence[float | None]) -> list[float] | None:
    """Returns the values; None if any of them is None."""
    found = [value for value in values if value is not None]
    return found if len(found) == len(values) else None


def _mean(values: Sequence[float] | None, figure: Figure) -> float | None:
    """Returns the geometric mean for ratios, unless a value is 0: the time between two simultaneous deliveries is."""
    if values is None:
        return None
    return float(np.mean(values) if figure.kind == "share" or min(values) == 0 else np.exp(np.mean(np.log(values))))


def _compare_requests(first: Result, second: Result, has_target: bool, is_paired: bool) -> Iterator[ComparisonRow]:
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
        values = [figure.run_figure(result, place, run) for result, place, run in runs]
        yield ComparisonRow(figure, values[0], values[1], intervals.get(figure.name))


def _described(result: Result) -> dict[str, Any]:
    return {
        "file": str(result.path), "title": result.title, "runs": len(result.recorders),
        "requests": len(result.recorders[0].timelines),
    }  # fmt: skip


def _named(found: Sequence[tuple[str, Any, Any]]) -> list[dict[str, Any]]:
    return [{"field": name, "first": one, "second": other} for name, one, other in found]


def _row_fields(row: ComparisonRow) -> dict[str, Any]:
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
        "test": None if interval is None else interval.test,
        "verdict": row.verdict or None,
    }

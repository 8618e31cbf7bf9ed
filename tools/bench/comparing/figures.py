"""The figures that are compared, and the values of requests behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.tools.bench.recorder import Recorder, Timeline
from penstock.tools.bench.result_file import Result
from penstock.tools.bench.summary import Summary, Target, e2e_s, gaps_s, tpot_s, ttft_s

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Statistic = Literal["mean", "p50", "p90", "p99"]

STATISTICS: tuple[Statistic, ...] = ("mean", "p50", "p90", "p99")
"""The maximum is left out: it says little about that of the next run, and resampling never exceeds it."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

_LATENCIES = ("TTFT", "TPOT", "ITL", "E2E")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a comparison.

    Figures of kind `share` lie between 0 and 1, and their change is a difference; for all others it is a ratio.
    """

    name: str
    unit: str
    kind: Literal["rate", "latency", "share"]
    is_better_high: bool
    latency: str = ""
    statistic: Statistic = "mean"

    def run_figure(self, result: Result, place: int, run: Summary) -> float | None:
        """Returns the figure of one run; None: there is none, as nothing succeeded."""
        if self.kind == "latency":
            spread = getattr(run, f"{self.latency.lower()}_ms")
            return None if spread is None else float(getattr(spread, self.statistic))
        if self.name == "CPU time":
            return result.cpu_s[place] or None
        if self.name == "failed":
            return run.num_failed / run.num_requests
        value: float | None = getattr(run, _RUN_FIELDS[self.name])
        return value if self.kind == "share" else value or None


_RUN_FIELDS = {
    "output rate": "output_tokens_per_s",
    "request rate": "requests_per_s",
    "good rate": "good_requests_per_s",
    "good": "good_share",
}


def figures(has_target: bool) -> Iterator[Figure]:
    """Yields all figures. `has_target`: whether requests had a target."""
    yield Figure("output rate", "tok/s", "rate", is_better_high=True)
    yield Figure("request rate", "req/s", "rate", is_better_high=True)
    if has_target:
        yield Figure("good rate", "req/s", "rate", is_better_high=True)
        yield Figure("good", "%", "share", is_better_high=True)
    yield Figure("failed", "%", "share", is_better_high=False)
    yield Figure("CPU time", "s", "rate", is_better_high=False)
    for latency in _LATENCIES:
        for statistic in STATISTICS:
            yield Figure(f"{latency} {statistic}", "ms", "latency", False, latency, statistic)


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of one run, and the index of the request that each belongs to."""

    values: Floats  # in ascending order
    owners: Ints
    num_requests: int

    @classmethod
    def of(cls, recorder: Recorder, figure: Figure, target: Target) -> Sample:
        """Collects the values behind `figure`."""
        values_of = _request_reader(figure, target)
        found = [values_of(line) for line in recorder.timelines]
        owners = np.repeat(np.arange(len(found)), [len(values) for values in found])
        values = np.array([value for each in found for value in each], dtype=np.float64)
        order = np.argsort(values, kind="stable")
        return cls(values[order], owners[order], len(found))


def _request_reader(figure: Figure, target: Target) -> Callable[[Timeline], Sequence[float]]:
    """Returns what reads a request's values: one or several, none if it failed."""
    if figure.name == "failed":
        return lambda line: [float(not line.is_complete)]
    if figure.name == "good":
        return lambda line: [float(target.is_met_by(line))]
    of_latency: dict[str, Callable[[Timeline], Sequence[float]]] = {
        "TTFT": lambda line: [ttft_s(line)] if line.stamps_s else [],
        "TPOT": lambda line: [tpot_s(line)] if len(line.stamps_s) > 1 else [],
        "ITL": gaps_s,
        "E2E": lambda line: [e2e_s(line)],
    }
    of_whole = of_latency[figure.latency]
    return lambda line: of_whole(line) if line.is_complete else []

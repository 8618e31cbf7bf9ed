"""How sure a change is: an interval that has it in 95 of 100 cases, and where runs were repeated a p-value.

**Runs** are the unit where both sides have several: Welch's t on one value of each run (B. L. Welch, "The
generalization of Student's problem", Biometrika 34, 1947; whole runs as the unit: A. Georges, D. Buytaert, L. Eeckhout,
"Statistically rigorous Java performance evaluation", OOPSLA 2007). What differs between runs is in it.

**Pairs** are the unit where files were measured in turn, first, second, first, second: Student's t on the differences
within pairs ("The probable error of a mean", Biometrika 6, 1908). What changes slowly is the same for both of a pair.

**Requests** are the unit where a side has one run: a bootstrap with percentile intervals (B. Efron, R. Tibshirani, "An
Introduction to the Bootstrap", 1993, chapter 13), in which a request is drawn with all of its deliveries (clusters: A.
Davison, D. Hinkley, "Bootstrap Methods and their Application", 1997, section 3.8), and from both sides at once where
the load is the same. What differs between runs is not in it, and rates have none: a run has one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from penstock.worker.bench.comparing.figures import QUANTILES, Floats, Ints, Sample, Statistic

CONFIDENCE = 0.95
WELCH = "Welch's t-test"
PAIRED = "paired t-test"
RESAMPLES = 2000
SEED = 0
MIN_REQUESTS = 10  # of a run, for any interval by requests
MIN_BEYOND = 5  # values beyond a quantile, below which resampling does not know how far it may move


@dataclass(frozen=True, slots=True)
class Interval:
    """Of a change. `p`: how often chance alone gives such a difference or a larger one, by `test`; None: not tested."""

    low: float
    high: float
    p: float | None = None
    test: str | None = None

    def through(self, function: Callable[[float], float]) -> Interval:
        """Of an ascending function of the change."""
        return replace(self, low=function(self.low), high=function(self.high))


def by_runs(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Of the difference of the means of `second` and `first`, with two values or more each."""
    if np.ptp(first) == 0 and np.ptp(second) == 0:
        return _certain(float(np.mean(second) - np.mean(first)))
    with _narrow_ones():
        return _tested(stats.ttest_ind(second, first, equal_var=False), WELCH)


def by_pairs(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Of the mean of the differences of `second` and `first`, two or more, of which those at one place are a pair."""
    differences = np.subtract(second, first)
    if np.ptp(differences) == 0:
        return _certain(float(differences[0]))
    with _narrow_ones():
        return _tested(stats.ttest_rel(second, first), PAIRED)


def _certain(change: float) -> Interval:
    """Where nothing varies there is nothing to test."""
    return Interval(change, change)


@contextmanager
def _narrow_ones() -> Iterator[None]:
    """Values that are nearly the same have narrow intervals, of which scipy warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _tested(test: Any, name: str) -> Interval:
    low, high = test.confidence_interval(CONFIDENCE)
    return Interval(float(low), float(high), float(test.pvalue), name)


def by_requests(
    first: Sample, second: Sample, statistics: Sequence[Statistic], *, is_paired: bool, is_ratio: bool
) -> list[Interval | None]:
    """For each of `statistics` that of the change; None where there are too few requests to tell.

    Args:
        first: of one run.
        second: of one run.
        statistics: of what the samples have.
        is_paired: requests at one place are the same on both sides.
        is_ratio: the change is a ratio less 1, else a difference.
    """
    rng = np.random.default_rng(SEED)
    found = np.empty((RESAMPLES, 2, len(statistics)))
    for turn in range(RESAMPLES):
        drawn = _drawn(rng, first.num_requests)
        found[turn, 0] = _of_resample(first, drawn, statistics)
        found[turn, 1] = _of_resample(second, drawn if is_paired else _drawn(rng, second.num_requests), statistics)
    with np.errstate(divide="ignore", invalid="ignore"):
        changes = found[:, 1] / found[:, 0] - 1 if is_ratio else found[:, 1] - found[:, 0]
    return [
        _interval(changes[:, place]) if _is_enough(first, each) and _is_enough(second, each) else None
        for place, each in enumerate(statistics)
    ]


def _drawn(rng: np.random.Generator, num_requests: int) -> Ints:
    """How often each request is drawn."""
    return np.bincount(rng.integers(num_requests, size=num_requests), minlength=num_requests)


def _of_resample(sample: Sample, drawn: Ints, statistics: Sequence[Statistic]) -> list[float]:
    """As of a sample in which each value is as often as its request is drawn."""
    weights = drawn[sample.owners]
    up_to = np.cumsum(weights)
    total = int(up_to[-1]) if up_to.size else 0
    if total == 0:
        return [math.nan] * len(statistics)
    return [
        float(weights @ sample.values) / total
        if each == "mean"
        else _quantile(sample.values, up_to, QUANTILES[each] * (total - 1))
        for each in statistics
    ]


def _quantile(values: Floats, up_to: Ints, place: float) -> float:
    """The value at a place between two, as `numpy.percentile` has it; `up_to` counts values up to each."""
    below = math.floor(place)
    low, high = values[np.searchsorted(up_to, [below, math.ceil(place)], side="right")]
    return float(low + (high - low) * (place - below))


def _is_enough(sample: Sample, statistic: Statistic) -> bool:
    if np.unique(sample.owners).size < MIN_REQUESTS:
        return False
    return statistic == "mean" or sample.values.size * (1 - QUANTILES[statistic]) >= MIN_BEYOND


def _interval(changes: Floats) -> Interval | None:
    if not np.isfinite(changes).all():
        return None
    low, high = np.quantile(changes, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(low), float(high))

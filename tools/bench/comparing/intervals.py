"""How certain a change is: an interval that contains it in 95 of 100 cases, and for repeated runs a p-value.

**Runs** are the unit where both sides have several: Welch's t on one value of each run (B. L. Welch, "The
generalization of Student's problem", Biometrika 34, 1947; whole runs as the unit: A. Georges, D. Buytaert, L. Eeckhout,
"Statistically rigorous Java performance evaluation", OOPSLA 2007). Variation between runs is included.

**Pairs** are the unit where files were measured in turn, first, second, first, second: Student's t on the differences
within pairs ("The probable error of a mean", Biometrika 6, 1908). Slow changes affect both of a pair alike.

**Requests** are the unit where a side has one run: a bootstrap with percentile intervals (B. Efron, R. Tibshirani, "An
Introduction to the Bootstrap", 1993, chapter 13), in which a request is drawn with all of its deliveries (clusters: A.
Davison, D. Hinkley, "Bootstrap Methods and their Application", 1997, section 3.8), and from both sides at once if the
load is the same. Variation between runs is not included, and rates have no interval: a run has only one rate.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from penstock.tools.bench.comparing.figures import QUANTILES, Floats, Ints, Sample, Statistic

CONFIDENCE = 0.95
WELCH = "Welch's t-test"
PAIRED = "paired t-test"
RESAMPLES = 2000
SEED = 0
MIN_REQUESTS = 10  # in a run, for any interval by requests
MIN_BEYOND = 5  # values beyond a quantile: with fewer, resampling can't tell how far the quantile may move


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval of a change. `p`: probability of such a difference or a larger one by chance, from `test`; None: not
    tested.
    """

    low: float
    high: float
    p: float | None = None
    test: str | None = None

    def through(self, function: Callable[[float], float]) -> Interval:
        """Returns the interval with an increasing function applied to both ends."""
        return replace(self, low=function(self.low), high=function(self.high))


def by_runs(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Returns the interval of the difference of means; both have two values or more."""
    if np.ptp(first) == 0 and np.ptp(second) == 0:
        return _certain(float(np.mean(second) - np.mean(first)))
    with _narrow_ones():
        return _tested(stats.ttest_ind(second, first, equal_var=False), WELCH)


def by_pairs(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Returns the interval of the mean difference of `second` and `first`: two pairs or more, matched by index."""
    differences = np.subtract(second, first)
    if np.ptp(differences) == 0:
        return _certain(float(differences[0]))
    with _narrow_ones():
        return _tested(stats.ttest_rel(second, first), PAIRED)


def _certain(change: float) -> Interval:
    """Returns an interval of width zero, for values that do not vary."""
    return Interval(change, change)


@contextmanager
def _narrow_ones() -> Iterator[None]:
    """Silences scipy's warning that nearly equal values have narrow intervals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _tested(test: Any, name: str) -> Interval:
    low, high = test.confidence_interval(CONFIDENCE)
    return Interval(float(low), float(high), float(test.pvalue), name)


def by_requests(
    first: Sample, second: Sample, statistics: Sequence[Statistic], *, is_paired: bool, is_ratio: bool
) -> list[Interval | None]:
    """Returns the interval of the change for each of `statistics`; None: too few requests to tell.

    Args:
        first: one run.
        second: one run.
        statistics: to compute.
        is_paired: requests at the same index are the same.
        is_ratio: the change is a ratio less 1, else a difference.
    """
    rng = np.random.default_rng(SEED)
    found = np.empty((RESAMPLES, 2, len(statistics)))
    for turn in range(RESAMPLES):
        drawn = _drawn(rng, first.num_requests)
        found[turn, 0] = _resampled(first, drawn, statistics)
        found[turn, 1] = _resampled(second, drawn if is_paired else _drawn(rng, second.num_requests), statistics)
    with np.errstate(divide="ignore", invalid="ignore"):
        changes = found[:, 1] / found[:, 0] - 1 if is_ratio else found[:, 1] - found[:, 0]
    return [
        _interval(changes[:, place]) if _is_enough(first, each) and _is_enough(second, each) else None
        for place, each in enumerate(statistics)
    ]


def _drawn(rng: np.random.Generator, num_requests: int) -> Ints:
    """Draws requests with replacement; returns the counts."""
    return np.bincount(rng.integers(num_requests, size=num_requests), minlength=num_requests)


def _resampled(sample: Sample, drawn: Ints, statistics: Sequence[Statistic]) -> list[float]:
    """Returns statistics with each value as often as its request was drawn."""
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
    """Returns the value at a fractional rank, as `numpy.percentile` does; `up_to` has the cumulative counts."""
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

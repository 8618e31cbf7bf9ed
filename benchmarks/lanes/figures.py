"""The findings of a scenario, and their bounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.lanes.load import Outcome


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure and its bound."""

    name: str
    value: float
    least: float = -np.inf
    most: float = np.inf

    @property
    def is_met(self) -> bool:
        return bool(self.least <= self.value <= self.most)

    def row(self) -> dict[str, Any]:
        bound = f"<= {self.most:g}" if np.isfinite(self.most) else f">= {self.least:g}"
        return {"bar": self.name, "value": float(self.value), "bound": bound, "met": "yes" if self.is_met else "no"}


@dataclass(frozen=True, slots=True)
class Measured:
    rows: list[dict[str, Any]]
    bars: list[Bar]


def waits_s(found: Iterable[Outcome], group: str) -> np.ndarray:
    """Returns seconds from enqueue to first token in a group, without takeovers before it."""
    ends = [each.end for each in found if each.sent.arrival.group == group]
    return np.array([end.ttft_ms for end in ends if end is not None and end.ttft_ms is not None]) / 1000


def claimed_s(found: Iterable[Outcome]) -> np.ndarray:
    """Returns seconds from enqueue to first claim."""
    return np.array([each.end.queued_ms or 0 for each in found if each.end is not None]) / 1000


def spread(seconds: np.ndarray) -> dict[str, float]:
    """Returns quantiles in milliseconds."""
    p50, p90, p99, most = (1000 * float(value) for value in np.percentile(seconds, (50, 90, 99, 100)))
    return {"p50, ms": p50, "p90": p90, "p99": p99, "max": most}


def lost(found: Iterable[Outcome]) -> int:
    """Counts requests without an end."""
    return sum(each.end is None for each in found)

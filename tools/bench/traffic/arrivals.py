"""When requests arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np

from penstock.tools.bench.errors import ImpossibleLoad

ArrivalKind = Literal["burst", "constant", "poisson", "closed"]
KINDS: tuple[ArrivalKind, ...] = get_args(ArrivalKind)


class Process(Protocol):
    """Determines when requests arrive. `str` of it is a few words for people."""

    @property
    def concurrency(self) -> int | None:
        """Most requests that may be under way at once; None: arrivals wait for nobody."""

    def times_s(self, count: int, seed: int) -> list[float]:
        """Returns the seconds from the start to each of `count` arrivals, in order."""


@dataclass(frozen=True, slots=True)
class TracedArrivals:
    """The times of a trace, `speed` times as fast."""

    at_s: tuple[float, ...]  # from the first one, in order
    speed: float = 1.0

    @property
    def concurrency(self) -> int | None:
        return None

    def times_s(self, count: int, seed: int) -> list[float]:
        return [time_s / self.speed for time_s in self.at_s[:count]]

    def __str__(self) -> str:
        faster = "" if self.speed == 1 else f" at {self.speed:g} times the speed"
        return f"as traced over {(self.at_s[-1] if self.at_s else 0.0) / self.speed:,.1f} s{faster}"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process.

    `burst`: all at once. `constant` and `poisson`: `rate` a second, whether or not earlier ones have been answered.
    `closed`: the next one comes as soon as fewer than `concurrency` are under way.

    Raises:
        ImpossibleLoad: `rate` or `concurrency` is missing, out of range, or has no effect with this kind.
    """

    kind: ArrivalKind = "burst"
    rate: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ImpossibleLoad(f"--arrivals must be one of {', '.join(KINDS)}, not {self.kind!r}")
        _require("--rate", self.rate, self.kind, ("constant", "poisson"))
        _require("--concurrency", self.concurrency, self.kind, ("closed",))

    def times_s(self, count: int, seed: int) -> list[float]:
        """Returns seconds from the start to each arrival; for `closed`, the earliest moment: 0."""
        if self.rate is None:
            return [0.0] * count
        if self.kind == "constant":
            return [place / self.rate for place in range(count)]
        gaps = np.random.default_rng(seed).exponential(1.0 / self.rate, count)
        return [float(time_s) for time_s in np.cumsum(gaps)]

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.kind} at {self.rate:g}/s"
        return self.kind if self.concurrency is None else f"{self.kind}, {self.concurrency} at a time"


def _require(option: str, value: float | None, kind: ArrivalKind, kinds: tuple[ArrivalKind, ...]) -> None:
    if kind in kinds and value is None:
        raise ImpossibleLoad(f"--arrivals {kind} needs {option}")
    if kind not in kinds and value is not None:
        raise ImpossibleLoad(
            f"{option} {value:g} has no effect with --arrivals {kind}, only with {' and '.join(kinds)}"
        )
    if value is not None and not 0 < value < float("inf"):
        raise ImpossibleLoad(f"{option} must be above 0, not {value:g}")

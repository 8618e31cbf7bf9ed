"""Distributions of lengths, in tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.tools.bench.errors import ImpossibleLoad

_ARITY = {"fixed": 1, "uniform": 2, "loguniform": 2, "normal": 2, "lognormal": 3}
FORMS = "N, uniform:LOW:HIGH, loguniform:LOW:HIGH, normal:MEAN:DEVIATION or lognormal:MEDIAN:LOW:HIGH"

_RANGE_DEVIATIONS = 5
"""Width of the range of a log-normal distribution, in its standard deviations. Draws beyond an end are set to it."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths, never below 1. Both ends of a range belong to it."""

    kind: str
    values: tuple[int, ...]

    @classmethod
    def parse(cls, text: str, option: str) -> Lengths:
        """Reads one of FORMS.

        Raises:
            ImpossibleLoad: `text` is none of them.
        """
        kind, *parts = text.split(":") if ":" in text else ("fixed", text)
        if _ARITY.get(kind) != len(parts) or not all(part.isascii() and part.isdigit() for part in parts):
            raise ImpossibleLoad(f"{option} must be {FORMS}, not {text!r}")
        values = tuple(map(int, parts))
        if not _are_lengths(kind, values):
            raise ImpossibleLoad(
                f"{option} {text!r} has no lengths: they start at 1, and the upper end is not the lower"
            )
        return cls(kind, values)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        low, high = self.values[-2:] if len(self.values) > 1 else self.values * 2
        if self.kind == "fixed":
            return [low] * count
        if self.kind == "uniform":
            return [int(length) for length in rng.integers(low, high + 1, count)]
        if self.kind == "normal":
            return [max(1, round(length)) for length in rng.normal(low, high, count)]
        if self.kind == "lognormal":
            logs = rng.normal(np.log(self.values[0]), np.log(high / low) / _RANGE_DEVIATIONS, count)
        else:
            logs = rng.uniform(np.log(low), np.log(high), count)
        return [int(length) for length in np.exp(logs).round().clip(low, high)]

    def __str__(self) -> str:
        return ":".join([self.kind, *map(str, self.values)]) if self.kind != "fixed" else str(self.values[0])


def _are_lengths(kind: str, values: tuple[int, ...]) -> bool:
    if kind == "lognormal":
        median, low, high = values
        return 1 <= low <= median <= high
    return values[0] >= 1 and (not kind.endswith("uniform") or values[0] <= values[1])

"""Distributions of lengths, in tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.worker.bench.errors import ImpossibleLoad

_ARITY = {"fixed": 1, "uniform": 2, "loguniform": 2, "normal": 2}
FORMS = "N, uniform:LOW:HIGH, loguniform:LOW:HIGH or normal:MEAN:DEVIATION"


@dataclass(frozen=True, slots=True)
class Lengths:
    """One length per request, never below 1. Both ends of a range belong to it."""

    kind: str
    values: tuple[int, ...]

    @classmethod
    def parse(cls, text: str, option: str) -> Lengths:
        """Reads one of FORMS.

        Raises:
            ImpossibleLoad: it is none of them.
        """
        kind, *parts = text.split(":") if ":" in text else ("fixed", text)
        if _ARITY.get(kind) != len(parts) or not all(part.isascii() and part.isdigit() for part in parts):
            raise ImpossibleLoad(f"{option} must be {FORMS}, not {text!r}")
        values = tuple(map(int, parts))
        if values[0] < 1 or (kind.endswith("uniform") and values[1] < values[0]):
            raise ImpossibleLoad(
                f"{option} {text!r} has no lengths: they start at 1, and the upper end is not the lower"
            )
        return cls(kind, values)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` lengths."""
        low, high = self.values[0], self.values[-1]
        if self.kind == "fixed":
            return [low] * count
        if self.kind == "uniform":
            return [int(length) for length in rng.integers(low, high + 1, count)]
        if self.kind == "normal":
            return [max(1, round(length)) for length in rng.normal(low, high, count)]
        drawn = np.exp(rng.uniform(np.log(low), np.log(high), count)).round()
        return [int(length) for length in drawn.clip(low, high)]

    def __str__(self) -> str:
        return ":".join([self.kind, *map(str, self.values)]) if self.kind != "fixed" else str(self.values[0])

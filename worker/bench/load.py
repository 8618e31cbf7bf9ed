"""What is sent, and when: the same for an engine and for a service."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.worker.bench.arrivals import Arrivals
from penstock.worker.bench.datasets import BenchRequest
from penstock.worker.bench.summary import Target


@dataclass(frozen=True, slots=True)
class Load:
    """A benchmark's input. `seed` is that of the arrivals; the requests are drawn already."""

    requests: tuple[BenchRequest, ...]
    arrivals: Arrivals = field(default_factory=Arrivals)
    temperature: float = 0.0
    seed: int = 0
    target: Target = field(default_factory=Target)

    def times_s(self) -> list[float]:
        return self.arrivals.times_s(len(self.requests), self.seed)

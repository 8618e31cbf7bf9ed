"""The input of a benchmark: the same for an engine and for a service."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from penstock.tools.bench.errors import ImpossibleLoad
from penstock.tools.bench.summary import Target
from penstock.tools.bench.traffic.arrivals import Arrivals, Process
from penstock.tools.bench.traffic.datasets import BenchRequest


@dataclass(frozen=True, slots=True)
class Load:
    """A benchmark's input. `seed` is for the arrivals; the requests are already drawn."""

    requests: tuple[BenchRequest, ...]
    arrivals: Process = field(default_factory=Arrivals)
    temperature: float = 0.0
    seed: int = 0
    target: Target = field(default_factory=Target)

    def times_s(self) -> list[float]:
        return self.arrivals.times_s(len(self.requests), self.seed)

    def check_fits(self, max_model_len: int) -> None:
        """Raises ImpossibleLoad if a request of a trace is longer than a sequence of the model can be."""
        for request in self.requests:
            if request.source and len(request.prompt) + request.max_tokens > max_model_len:
                raise ImpossibleLoad(
                    f"{request.source}: {len(request.prompt)} prompt tokens and {request.max_tokens} output tokens "
                    f"never fit max_model_len {max_model_len}"
                )

    def digest(self) -> str:
        """Returns the first 16 hex digits of a SHA-256 over everything that is sent and when: equal for equal loads."""
        found = hashlib.sha256(repr((str(self.arrivals), self.temperature)).encode())
        for request, time_s in zip(self.requests, self.times_s(), strict=True):
            sent = (request.prompt, request.max_tokens, request.ignore_eos, *request.whose().items(), round(time_s, 6))
            found.update(repr(sent).encode())
        return found.hexdigest()[:16]

"""What a step's bound on prompts does to first tokens and to streams: the real scheduler, and a device made of a table.

    python -m benchmarks.pacing --model tiny --shares 0.2 0.4 1

Requests of the shared workload arrive at a part of what the device can serve. Times are those of steps on two cores
(docs/performance.md), so that the figures mean something beside each other, whatever else this machine does.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.tables import table_of
from penstock.engine import Request, SamplingParams
from penstock.engine.execution.geometry import Geometry
from penstock.engine.scheduling.pace import Pace, StepTimes
from penstock.engine.scheduling.page_pool import PagePool
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.slack import StepClock, foretold_s
from penstock.engine.scheduling.step_plan import StepPlan
from penstock.worker.bench.arrivals import Arrivals
from penstock.worker.bench.datasets import BenchRequest, random_requests

GEOMETRY = Geometry(max_num_seqs=64, max_batch_tokens=512, max_model_len=1024, page_size=16, vocab_size=8192)
HOST_S = 0.3e-3  # planning and dispatching
NOISE = 0.12  # a step takes up to so much longer than measured


@dataclass(frozen=True, slots=True)
class Device:
    """Seconds of a step: its own, and what each token, sampled row, and pair of a query and a key adds."""

    step_s: float
    token_s: float
    row_s: float
    pair_s: float

    def times(self) -> StepTimes:
        prompt_s = {count: self.step_s + self.token_s * count for count in GEOMETRY.token_buckets}
        decode_s = {count: prompt_s[count] + self.row_s * count for count in GEOMETRY.row_buckets}
        return StepTimes(prompt_s, decode_s, self.pair_s)


DEVICES = {
    "tiny": Device(2.2e-3, 66e-6, 12e-6, 0.11e-6),
    "qwen06": Device(36e-3, 1.05e-3, 0.08e-3, 0.44e-6),
}


class Simulation:
    """An engine's loop: a step is planned and dispatched while the one before it runs."""

    def __init__(self, device: Device, pace: Pace, *, waits: bool, seed: int) -> None:
        self.now_s = 0.0
        self.stamps_s: dict[str, list[float]] = {}
        self._measured, self._pace, self._waits = Pace(device.times()), pace, waits
        self._clock = StepClock(lambda: self.now_s)
        self._noise = random.Random(seed)
        self._scheduler = Scheduler(
            PagePool(4096, GEOMETRY.page_size, prefix_caching=False), max_num_seqs=GEOMETRY.max_num_seqs,
            max_batch_tokens=GEOMETRY.max_batch_tokens, max_model_len=GEOMETRY.max_model_len,
        )  # fmt: skip
        self._in_flight: tuple[StepPlan, float] | None = None  # with its end

    def run(self, requests: Rows[BenchRequest], times_s: Rows[float]) -> None:
        coming = list(enumerate(zip(requests, times_s, strict=True)))[::-1]
        while coming or self._scheduler.running or self._scheduler.waiting or self._in_flight:
            if not (self._scheduler.running or self._scheduler.waiting or self._in_flight):
                self.now_s = max(self.now_s, coming[-1][1][1])
            if self._waits:
                self.now_s += self._clock.slack_s()
            while coming and coming[-1][1][1] <= self.now_s:
                number, (request, _) = coming.pop()
                self._add(number, request)
            self._step()

    def _add(self, number: int, request: BenchRequest) -> None:
        ids = tuple(part for part in request.prompt if isinstance(part, int))
        params = SamplingParams(max_tokens=request.max_tokens)
        self.stamps_s[str(number)] = []
        self._scheduler.add(Sequence(Request(str(number), ids, params), 0, number))

    def _step(self) -> None:
        self._clock.begin(is_idle=self._in_flight is None)
        plan, last = self._scheduler.plan(self._pace), self._in_flight
        self._in_flight = None
        if plan is not None:
            self.now_s += HOST_S
            usual_s = foretold_s(plan, self._measured)
            assert usual_s is not None
            self._clock.dispatched(usual_s)
            start_s = self.now_s if last is None else max(self.now_s, last[1])
            self._in_flight = plan, start_s + usual_s * (1 + self._noise.uniform(0, NOISE))
        if last is not None:
            self.now_s = max(self.now_s, last[1])
            self._clock.ended()
            self._commit(last[0])

    def _commit(self, plan: StepPlan) -> None:
        for row in plan.rows:
            self._scheduler.commit(row, 7 if row.num_sampled else None)
            if row.num_sampled:
                stamps_s = self.stamps_s[row.sequence.request.id]
                stamps_s.append(self.now_s)
                if len(stamps_s) == row.sequence.request.sampling.max_tokens:
                    self._scheduler.finish(row.sequence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(DEVICES), default="tiny")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.2, 0.4, 0.6, 1.0])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.2, 0.4, 0.8])
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    device = DEVICES[arguments.model]
    capacity = 64 / simulated(device, Pace(device.times()), 64, None, 0)["seconds"]
    rows = list(measured(device, capacity, arguments))
    Console().print(table_of(f"{arguments.model}, {capacity:.3g} requests/s served at most, medians", rows))


def measured(device: Device, capacity: float, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """In turn: bursts, then each load. Plans are made late, as the engine does it, or at once."""
    for load in [None, *arguments.loads]:
        for share in arguments.shares:
            for waits in (True, False):
                rate = None if load is None else load * capacity
                pace = Pace(device.times(), share)
                found = [
                    simulated(device, pace, arguments.requests, rate, seed, waits=waits)
                    for seed in range(arguments.seeds)
                ]
                yield {
                    "load": "all at once" if load is None else f"{load:g}", "prefill_share": share,
                    "plans": "late" if waits else "at once",
                    **{name: statistics.median(each[name] for each in found) for name in found[0]},
                }  # fmt: skip


def simulated(
    device: Device, pace: Pace, count: int, rate: float | None, seed: int, *, waits: bool = True
) -> dict[str, float]:
    requests = random_requests(count, GEOMETRY.vocab_size, seed=seed)
    times_s = (Arrivals() if rate is None else Arrivals("poisson", rate)).times_s(count, seed + 1)
    simulation = Simulation(device, pace, waits=waits, seed=seed)
    simulation.run(requests, times_s)
    stamps_s = list(simulation.stamps_s.values())
    first_s = [stamps[0] - time_s for stamps, time_s in zip(stamps_s, times_s, strict=True)]
    gaps_s = np.concatenate([np.diff(stamps) for stamps in stamps_s])
    return {
        "seconds": round(simulation.now_s, 3),
        "TTFT p50, ms": round(1e3 * float(np.percentile(first_s, 50)), 1),
        "TTFT p90, ms": round(1e3 * float(np.percentile(first_s, 90)), 1),
        "ITL p50, ms": round(1e3 * float(np.percentile(gaps_s, 50)), 1),
        "ITL p99, ms": round(1e3 * float(np.percentile(gaps_s, 99)), 1),
        "ITL max, ms": round(1e3 * float(gaps_s.max()), 1),
    }


if __name__ == "__main__":
    main()

"""Simulates what a step's limit on prompts does to first tokens and to streams: the real scheduler on a tabulated
device.

    python -m benchmarks.pacing --model tiny --shares 0.2 0.4 1

Requests of the shared workload arrive at a share of what the device can serve. Step times are those on two cores
(docs/performance.md), so that the figures are comparable, whatever else this machine does.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.parts.tables import table_of
from benchmarks.simulation import trace_of
from penstock.engine.execution.geometry import Geometry
from penstock.engine.scheduling.memory.page_pool import PagePool
from penstock.engine.scheduling.pace import Pace, StepTimes
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.tools.bench.traffic.arrivals import Arrivals
from penstock.tools.bench.traffic.datasets import random_requests
from penstock.tools.bench.traffic.load import Load
from penstock.tools.plan.replica import Replica
from penstock.tools.plan.simulation import simulate
from penstock.tools.plan.step_times import StepShape

GEOMETRY = Geometry(max_num_seqs=64, max_batch_tokens=512, max_model_len=1024, page_size=16, vocab_size=8192)
HOST_S = 0.3e-3  # planning and dispatching
NOISE = 0.12  # a step takes up to this share longer than measured


@dataclass(frozen=True, slots=True)
class Device:
    """Seconds of a step: a constant, plus those of each token, sampled row, and query-key pair."""

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


class UnevenSteps:
    """A `StepTiming` of a device whose steps take up to NOISE longer than expected."""

    def __init__(self, device: Device, seed: int) -> None:
        self._times = device.times()
        self._noise = random.Random(seed)

    def step_s(self, shape: StepShape) -> float:
        usual_s = self._times.step_s(shape.num_tokens, shape.num_sampled, shape.num_pairs)
        return usual_s * (1 + self._noise.uniform(0, NOISE))

    def plan_s(self, shape: StepShape) -> float:
        return HOST_S

    def commit_s(self, shape: StepShape) -> float:
        return 0.0


class Hasty(Replica):
    """Plans each step as soon as it can, whenever the device needs it."""

    def commit(self) -> float:
        super().commit()
        return self.now_s


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
    """Runs bursts, then each load. Plans are made late, as the engine does, or at once."""
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
    arrivals = Arrivals() if rate is None else Arrivals("poisson", rate)
    scheduler = Scheduler(
        PagePool(4096, GEOMETRY.page_size, prefix_caching=False), max_num_seqs=GEOMETRY.max_num_seqs,
        max_batch_tokens=GEOMETRY.max_batch_tokens, max_model_len=GEOMETRY.max_model_len,
    )  # fmt: skip
    kind = Replica if waits else Hasty
    replica = kind(scheduler, pace, UnevenSteps(device, seed), GEOMETRY.max_num_seqs, takes_all=True)
    simulate(trace_of(Load(tuple(requests), arrivals, seed=seed + 1)), [replica])
    first_s = [served.ttft_s for served in replica.served]
    gaps_s = np.concatenate([np.diff(served.stamps_s) for served in replica.served])
    return {
        "seconds": round(replica.now_s, 3),
        "TTFT p50, ms": round(1e3 * float(np.percentile(first_s, 50)), 1),
        "TTFT p90, ms": round(1e3 * float(np.percentile(first_s, 90)), 1),
        "ITL p50, ms": round(1e3 * float(np.percentile(gaps_s, 50)), 1),
        "ITL p99, ms": round(1e3 * float(np.percentile(gaps_s, 99)), 1),
        "ITL max, ms": round(1e3 * float(gaps_s.max()), 1),
    }


if __name__ == "__main__":
    main()

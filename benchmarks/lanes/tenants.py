"""Measures two tenants, one with 100 times the load of the other: far more than the fleet can serve.

The small one asks for a part of half the fleet: for a third, for two thirds, and for nearly all. Its waits for first
tokens are compared with those when it has that half to itself. Both fleets run all the time, and get the same requests
of it, one after the other.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from benchmarks.lanes.figures import Bar, Measured, lost, spread, waits_s
from benchmarks.lanes.fleet import Fleet, running_fleet
from benchmarks.lanes.load import Arrival, Outcome, Sending, body, drop_all, outcomes, poisson, send_all, until_ended
from benchmarks.lanes.worker import PacedWorker
from benchmarks.parts.paced_engine import Device

DEVICE = Device(25e-3, 0.02e-3, 0.02e-3)
SLOTS = 16
PROMPT, OUTPUT = 32, (4, 60)  # tokens; reply lengths are uniform, so that slots do not become free all at once
TIMES = 100  # the load of one over that of the other
LOADS = (0.3, 0.6, 0.9)  # of the small tenant, as shares of what half the fleet can serve
DRAIN_S = 30.0


async def measure(seconds: float, seed: int) -> Measured:
    workers = [_worker("whole", place) for place in range(4)] + [_worker("half", place) for place in range(2)]
    random = Random(seed)
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    num_lost = 0
    async with running_fleet(workers) as fleet:
        for load in LOADS:
            rate = load * 2 * SLOTS / ((sum(OUTPUT) / 2 + 1) * DEVICE.step_s(SLOTS, SLOTS))
            small = _arrivals("small", rate, seconds, random)
            crowd = _arrivals("crowd", TIMES * rate, seconds, random)
            found = {
                "half the fleet, alone": await _run(fleet, "half", small),
                "whole fleet, beside the other": await _run(fleet, "whole", [*small, *crowd]),
            }
            rows += [
                {"load": load, "tenant": group, "where": where, "requests": len(waits), **spread(waits)}
                for where, each in found.items()
                for group in ("small", "crowd")
                if len(waits := waits_s(each, group))
            ]
            num_lost += sum(lost(each) for each in found.values())
            alone, beside = (float(np.percentile(waits_s(each, "small"), 99)) for each in found.values())
            bars.append(Bar(f"p99 wait of the small one over alone, load {load}", beside / alone, most=2.0))
    return Measured(rows, [*bars, Bar("lost", num_lost, most=0)])


def _worker(queue: str, place: int) -> PacedWorker:
    return PacedWorker(f"{queue}{place}", queue, SLOTS, DEVICE, max_model_len=128)


def _arrivals(tenant: str, rate: float, seconds: float, random: Random) -> list[Arrival]:
    times = poisson(rate, seconds, random)
    return [Arrival(at_s, tenant, body(PROMPT, random.randint(*OUTPUT), tenant=tenant)) for at_s in times]


async def _run(fleet: Fleet, queue: str, arrivals: list[Arrival]) -> list[Outcome]:
    """Returns outcomes of all the small tenant's requests, and of the other's that ended meanwhile; the rest is
    dropped.
    """
    sending = Sending(queue)
    await send_all(fleet.redis, sending, arrivals)
    small = [each for each in sending.sent if each.arrival.group == "small"]
    await until_ended(fleet.redis, Sending(queue, small), DRAIN_S)
    fleet.check()
    found = await outcomes(fleet.redis, sending)
    await drop_all(fleet.redis, sending)
    return [each for each in found if each.end is not None or each.sent.arrival.group == "small"]

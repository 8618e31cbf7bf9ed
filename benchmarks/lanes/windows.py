"""Measures long batch work with windows, more than the fleet can serve at once, and short interactive requests beside
it.

In turn: interactive requests alone, batch work alone, both. Most windows are long; some are too short to be kept behind
the others, and their replies must say so.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import numpy as np

from benchmarks.lanes.figures import Bar, Measured, lost, spread, waits_s
from benchmarks.lanes.fleet import Fleet, running_fleet
from benchmarks.lanes.load import (
    Arrival,
    Outcome,
    Sending,
    body,
    cancel_rest,
    num_generated,
    num_handed_back,
    outcomes,
    poisson,
    send_all,
    until_empty,
)
from benchmarks.lanes.worker import PacedWorker
from benchmarks.parts.paced_engine import Device

DEVICE = Device(40e-3, 0.02e-3, 0.02e-3)
WORKERS, SLOTS = 4, 8
PROMPT = 64
INTERACTIVE = {"priority": 5, "tenant": "people"}
INTERACTIVE_OUTPUT, INTERACTIVE_RATE = 10, 5.0
BATCH = {"priority": -5, "tenant": "nightly"}
BATCH_OUTPUT = (100, 300)  # tokens, uniform
WINDOW_S, SHORT_WINDOW_S, SHORT_SHARE = 3600.0, 4.0, 0.05
SETTLE_S = 3.0  # until the fleet is full and batch tokens are counted
LATE_S = 1.0  # how late after its window an end may be written
DRAIN_S = 60.0


async def measure(seconds: float, seed: int) -> Measured:
    workers = [
        PacedWorker(f"w{place}", "lanes", SLOTS, DEVICE, config={"flush_interval_ms": 100}) for place in range(WORKERS)
    ]
    random = Random(seed)
    people = [
        Arrival(SETTLE_S + at_s, "interactive", body(PROMPT, INTERACTIVE_OUTPUT, **INTERACTIVE))
        for at_s in poisson(INTERACTIVE_RATE, seconds, random)
    ]
    async with running_fleet(workers) as fleet:
        empty, _, _ = await _run(fleet, people, [], seconds)
        _, alone_rate, _ = await _run(fleet, [], _batch(seconds / 2, random), seconds / 2)
        both, beside_rate, handed_back = await _run(fleet, people, _batch(seconds, random), seconds)
    alone_s, beside_s = waits_s(empty, "interactive"), waits_s(both, "interactive")
    kept = [_standing(each) for each in both if each.sent.arrival.group == "batch"]
    rows: list[dict[str, Any]] = [
        {"fleet": "without batch work", "requests": len(alone_s), **spread(alone_s), "batch tok/s": 0.0},
        {"fleet": "full of batch work", "requests": len(beside_s), **spread(beside_s), "batch tok/s": beside_rate},
        {"fleet": "batch work alone", "requests": 0, **dict.fromkeys(spread(alone_s), 0.0), "batch tok/s": alone_rate},
    ]
    for row in rows:
        row |= {"handed back": 0, "windows kept": 0, "reported": 0, "neither": 0}
    counts = {name: kept.count(name) for name in ("kept", "reported", "neither")}
    rows[1] |= {"handed back": handed_back, "windows kept": counts["kept"]}
    rows[1] |= {"reported": counts["reported"], "neither": counts["neither"]}
    ratio = float(np.percentile(beside_s, 99) / np.percentile(alone_s, 99))
    return Measured(
        rows,
        [
            Bar("interactive p99 TTFT over that of an empty fleet", ratio, most=1.2),
            Bar("batch throughput over alone", beside_rate / alone_rate, least=0.85),
            Bar("lost", lost(both), most=0),
            Bar("windows neither kept nor reported", counts["neither"], most=0),
        ],
    )


def _batch(seconds: float, random: Random) -> list[Arrival]:
    """Draws requests for one moment, slightly over what the fleet can generate in that time."""
    wanted = 1.1 * (seconds + SETTLE_S) * WORKERS * SLOTS / DEVICE.step_s(SLOTS, SLOTS)
    found: list[Arrival] = []
    while wanted > 0:
        output = random.randint(*BATCH_OUTPUT)
        window_s = SHORT_WINDOW_S if random.random() < SHORT_SHARE else WINDOW_S
        found.append(Arrival(0.0, "batch", body(PROMPT, output, timeout_s=window_s, **BATCH)))
        wanted -= output
    return found


async def _run(
    fleet: Fleet, people: list[Arrival], batch: list[Arrival], seconds: float
) -> tuple[list[Outcome], float, int]:
    """Returns all outcomes, batch tokens per second while there was more than enough work, and requests given back."""
    queue = "lanes"
    of_batch, of_people = Sending(queue), Sending(queue)
    await send_all(fleet.redis, of_batch, batch)
    sending = asyncio.create_task(send_all(fleet.redis, of_people, people))
    await asyncio.sleep(SETTLE_S)
    before, begun_s = await num_generated(fleet.redis, of_batch), asyncio.get_running_loop().time()
    await asyncio.sleep(seconds)
    generated = await num_generated(fleet.redis, of_batch) - before
    rate = generated / (asyncio.get_running_loop().time() - begun_s)
    await sending
    if people:
        await until_empty(fleet.redis, queue, DRAIN_S)
    else:
        await cancel_rest(fleet.redis, of_batch)
    fleet.check()
    found = [*await outcomes(fleet.redis, of_people), *await outcomes(fleet.redis, of_batch)]
    return found, rate, await num_handed_back(fleet.redis, of_batch)


def _standing(outcome: Outcome) -> str:
    """Says whether a batch request's window was kept, or its reply says that it was not."""
    end, window_s = outcome.end, float(outcome.sent.arrival.fields["timeout_s"])
    if end is None:
        return "neither"
    if end.finish_reason == "expired":
        return "reported"
    return "kept" if end.finish_reason == "length" and (end.total_ms or 0) / 1000 <= window_s + LATE_S else "neither"

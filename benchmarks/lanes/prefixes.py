"""Measures prompts that begin alike, on workers that each hold only some of the beginnings.

Three setups run in turn, each with its own queue: every prompt has another home (plain pull), prompts that begin alike
share a home, and one worker is as large as the four together. Then one of the second four is killed and one gets slow:
nobody may wait for either longer than `steal_after_ms` and the life of a heartbeat. A version without `affinity` runs
the same, and all is plain pull.
"""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import fields
from random import Random
from typing import Any

from benchmarks.lanes.figures import Bar, Measured, claimed_s, lost, spread
from benchmarks.lanes.fleet import Fleet, running_fleet
from benchmarks.lanes.load import Arrival, Outcome, Sending, outcomes, poisson, send_all, until_empty
from benchmarks.lanes.worker import PacedWorker
from benchmarks.parts.paced_engine import PAGE_SIZE, Device
from penstock.protocol.wire import GenerateRequest
from penstock.worker.config import WorkerConfig

DEVICE = Device(25e-3, 0.1e-3, 0.02e-3)
WORKERS, SLOTS = 4, 4
PREFIXES, PREFIX, OWN, OUTPUT = 8, 2000, 40, 16  # number, and tokens of each part
HELD = 3  # prefixes that one worker holds, besides what its slots need
RATE, TROUBLED_RATE = 8.0, 4.0
HEARTBEAT_S, SCAN_S, BLOCK_S, STEAL_S = 3.0, 0.5, 0.5, 1.0
DRAIN_S = 60.0
_LONGEST = PREFIX + OWN + 4 * OUTPUT

_HAS_AFFINITY = "affinity" in GenerateRequest.model_fields
_CAN_STEAL = "steal_after_ms" in {each.name for each in fields(WorkerConfig)}


async def measure(seconds: float, seed: int) -> Measured:
    random = Random(seed)
    names = [f"w{place}" for place in range(WORKERS)]
    workers = [_worker(f"p{place}", "plain", 1) for place in range(WORKERS)]
    workers += [_worker(name, "four", 1) for name in names] + [_worker("large", "one", WORKERS)]
    steal_s = STEAL_S if _CAN_STEAL else 0.0
    promised_s = steal_s + HEARTBEAT_S + 1.25 * SCAN_S + BLOCK_S
    async with running_fleet(workers) as fleet:
        sides = {
            "four, plain pull": await _run(fleet, "plain", _arrivals(RATE, seconds, "own", random)),
            "four, affinity": await _run(fleet, "four", _arrivals(RATE, seconds, "prefix", random)),
            "one large": await _run(fleet, "one", _arrivals(RATE, seconds, "prefix", random)),
        }
        arrivals = _arrivals(TROUBLED_RATE, 1.5 * seconds, "prefix", random)
        trouble = asyncio.create_task(_trouble(fleet, names, seconds / 4))
        sides["one killed, one slow"] = await _run(fleet, "four", arrivals)
        await trouble
    rows: list[dict[str, Any]] = [
        {
            "fleet": name,
            "requests": len(found),
            "hits": _hit_rate(found),
            **spread(claimed_s(found)),
            "first token, max": _longest(found),
        }
        for name, found in sides.items()
    ]
    plain, home, large, _ = (row["hits"] for row in rows)
    return Measured(
        rows,
        [
            Bar("prefix hits over those of one large worker", home / large, least=0.9),
            Bar("prefix hits over those of plain pull", home / plain, least=2.0),
            Bar("longest wait beside trouble, over the promise", rows[3]["max"] / 1000 / promised_s, most=1.0),
            Bar("lost", sum(lost(found) for found in sides.values()), most=0),
        ],
    )


def _worker(name: str, queue: str, size: int) -> PacedWorker:
    """Makes a worker as large as `size` of the four."""
    of_prefix = PREFIX // PAGE_SIZE
    num_pages = 1 + size * (HELD * of_prefix + SLOTS * (-(-_LONGEST // PAGE_SIZE) - of_prefix + 1))
    config: dict[str, Any] = {
        "heartbeat_ttl_s": HEARTBEAT_S,
        "reclaim_interval_s": SCAN_S,
        "block_ms": round(1000 * BLOCK_S),
        "flush_interval_ms": 100,
    }
    if _CAN_STEAL:
        config["steal_after_ms"] = round(1000 * STEAL_S)
    return PacedWorker(name, queue, size * SLOTS, DEVICE, max_model_len=_LONGEST, num_pages=num_pages, config=config)


def _arrivals(rate: float, seconds: float, home: str, random: Random) -> list[Arrival]:
    """Draws arrivals with new beginnings. `home`: whether prompts with one beginning share a home (prefix), or each has
    its own.
    """
    beginnings = [(random.getrandbits(48), _ids(PREFIX, random)) for _ in range(PREFIXES)]
    found = []
    for at_s in poisson(rate, seconds, random):
        name, prefix = random.choice(beginnings)
        fields = {
            "prompt_token_ids": json.dumps([*prefix, *_ids(OWN, random)]),
            "max_tokens": str(OUTPUT), "ignore_eos": "true",
        }  # fmt: skip
        if _HAS_AFFINITY:
            fields["affinity"] = f"{name if home == 'prefix' else random.getrandbits(48):x}"
        found.append(Arrival(at_s, home, fields))
    return found


def _ids(count: int, random: Random) -> list[int]:
    return random.choices(range(1, 1000), k=count)


async def _run(fleet: Fleet, queue: str, arrivals: list[Arrival]) -> list[Outcome]:
    sending = Sending(queue)
    await send_all(fleet.redis, sending, arrivals)
    await until_empty(fleet.redis, queue, DRAIN_S)
    fleet.check()
    return await outcomes(fleet.redis, sending)


async def _trouble(fleet: Fleet, names: list[str], after_s: float) -> None:
    await asyncio.sleep(after_s)
    fleet.send(names[0], signal.SIGKILL)
    fleet.send(names[1], signal.SIGUSR1)


def _longest(found: list[Outcome]) -> float:
    """Returns the longest time to a first token, in ms."""
    return float(max(each.end.ttft_ms or 0 for each in found if each.end is not None))


def _hit_rate(found: list[Outcome]) -> float:
    """Returns the share of cached prompt tokens."""
    ends = [each.end for each in found if each.end is not None]
    return sum(end.cached_tokens for end in ends) / max(1, sum(end.prompt_tokens for end in ends))

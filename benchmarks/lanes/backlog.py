"""The scripts that give entries out, behind a million entries of a thousand tenants, and behind a thousand.

What each takes is what the server itself says of it (SLOWLOG): microseconds in which it does nothing else. Between two
runs of `take` its entries leave the queue and as many new ones come, so that the backlog stays as long as it is.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Any, cast

import numpy as np
from hiredis import pack_command

from benchmarks.lanes.figures import Bar, Measured
from penstock.producer import keys
from penstock.producer.redis.connection import RedisClient, connect, ensure_group
from penstock.producer.redis.pipeline import Command, execute_one, script_hash
from penstock.worker.local.embedded import EmbeddedServer
from penstock.worker.protocol import scripts
from penstock.worker.protocol.scripts import Bill

QUEUE = "backlog"
TENANTS = 1000
SIZES = (1000, 1_000_000)
COUNT = 8  # entries that one take is for
PAGE = 1000
MOST_S = 90.0  # for the whole of one size; a slow machine ends with fewer entries
LIMITS: dict[str, Any] = {"max_body_bytes": 1 << 20, "max_bytes": 8 << 20}


async def measure(seconds: float, rounds: int, seed: int) -> Measured:  # noqa: ARG001  nothing is random
    rows = [row for size in SIZES for row in await _behind(size, seconds)]
    bars = []
    for script in ("take", "ack", "sweep"):
        small, large = (row for row in rows if row["script"] == script)
        bars.append(Bar(f"{script}: median behind {SIZES[1]:,} over {SIZES[0]:,}", large["p50, us"] / small["p50, us"], most=1.5))
        bars.append(Bar(f"{script}: p99 behind {SIZES[1]:,} over {SIZES[0]:,}", large["p99"] / small["p99"], most=2.0))
    lane_s = 10_000 * max(row["laned, us each"] for row in rows) / 1e6
    bars.append(Bar("seconds in which 10,000 entries get their places", lane_s, most=1.0))
    return Measured(rows, bars)


async def _behind(size: int, seconds: float) -> list[dict[str, Any]]:
    give_up_s = time.monotonic() + MOST_S
    with EmbeddedServer() as server:
        redis = connect(server.socket_url, decode=False)
        await ensure_group(redis, QUEUE)
        waiting = await _fill(redis, size, give_up_s)
        laned_us = await _lane(redis, give_up_s)
        times = await _timed(redis, seconds, give_up_s)
        memory: Any = await redis.info("memory")
        await redis.aclose()
    return [
        {
            "script": name, "waiting": waiting, "runs": len(each), **_spread(each), "laned, us each": laned_us,
            "MB": memory["used_memory"] / 1e6,
        }
        for name, each in times.items()
    ]  # fmt: skip


async def _fill(redis: RedisClient, size: int, give_up_s: float) -> int:
    """Entries of all tenants in turn, in pages of the same bytes."""
    connection: Any = await redis.connection_pool.get_connection()  # type: ignore[no-untyped-call]
    page = b"".join(pack_command(cast("Any", _entry(place % TENANTS))) for place in range(PAGE))
    count = 0
    while count < size and time.monotonic() < give_up_s:
        await connection.send_packed_command([page])
        for _ in range(PAGE):
            await connection.read_response()
        count += PAGE
    await redis.connection_pool.release(connection)
    return count


def _entry(tenant: int) -> Command:
    return ("XADD", keys.requests(QUEUE), "*", "prompt", "hello there", "max_tokens", "1", "tenant", f"t{tenant}")


async def _lane(redis: RedisClient, give_up_s: float) -> float:
    """Gives all their places; microseconds for each."""
    before = await _cpu_s(redis)
    has_more = True
    while has_more and time.monotonic() < give_up_s:
        _, has_more, _ = await execute_one(redis, _take(0))
    pending: Any = await redis.xpending(keys.requests(QUEUE), keys.GROUP)
    return 1e6 * (await _cpu_s(redis) - before) / max(1, int(pending["pending"]))


async def _timed(redis: RedisClient, seconds: float, give_up_s: float) -> dict[str, list[float]]:
    """Microseconds of each run, by script."""
    await redis.config_set("slowlog-max-len", 100)
    await redis.config_set("slowlog-log-slower-than", 0)
    hashes = {script_hash(str(command[1])): name for name, command in _commands().items()}
    found: dict[str, list[float]] = defaultdict(list)
    number, until_s = 0, min(give_up_s, time.monotonic() + seconds)
    while time.monotonic() < until_s:
        await redis.slowlog_reset()
        answer, *_ = await execute_one(redis, _take(COUNT))
        bills = [Bill(entry[0].decode(), _tenant(entry[3]), 20) for entry in answer]
        await execute_one(redis, scripts.charge(QUEUE, worker="w", bills=bills))
        await execute_one(redis, scripts.ack(QUEUE, worker="w", bills=bills))
        await execute_one(redis, scripts.sweep(QUEUE, worker="w", count=64, **LIMITS))
        for bill in bills:
            await execute_one(redis, _entry(int(bill.tenant[1:])))
        number += 1
        for each in cast("Any", await redis.slowlog_get(100)):
            parts = each["command"].split()
            if parts[0] == b"EVALSHA" and parts[1].decode() in hashes and number > 3:
                found[hashes[parts[1].decode()]].append(float(each["duration"]))
        await asyncio.sleep(0)
    return found


def _commands() -> dict[str, Command]:
    return {
        "take": _take(COUNT),
        "charge": scripts.charge(QUEUE, worker="w", bills=[]),
        "ack": scripts.ack(QUEUE, worker="w", bills=[]),
        "sweep": scripts.sweep(QUEUE, worker="w", count=64, **LIMITS),
    }


def _take(count: int) -> Command:
    return scripts.take(QUEUE, worker="w", count=count, **LIMITS)


def _tenant(flat: list[bytes]) -> str:
    return dict(zip(flat[::2], flat[1::2], strict=True))[b"tenant"].decode()


async def _cpu_s(redis: RedisClient) -> float:
    info: Any = await redis.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def _spread(values: list[float]) -> dict[str, float]:
    p50, p99, most = (float(value) for value in np.percentile(values, (50, 99, 100)))
    return {"p50, us": p50, "p99": p99, "max": most}

"""Measures the scripts that give entries out, behind a million entries of a thousand tenants, and behind a thousand.

The time of each is from the server's SLOWLOG: microseconds in which it does nothing else. Between two runs of `take`,
its entries leave the queue and as many new ones come, so the backlog keeps its length. Both servers run at the same
time and are asked in turn.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
from hiredis import pack_command

from benchmarks.lanes.figures import Bar, Measured
from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient, connect, ensure_group
from penstock.protocol.redis.pipeline import Command, execute_one, script_hash
from penstock.protocol.scripts import Bill

QUEUE = "backlog"
TENANTS = 1000
SIZES = (1000, 1_000_000)
COUNT = 8  # entries per take
PAGE = 1000
MOST_S = 90.0  # for all of one size; a slow machine ends up with fewer entries
LIMITS: dict[str, Any] = {"max_body_bytes": 1 << 20, "max_bytes": 8 << 20}


async def measure(seconds: float, seed: int) -> Measured:
    async with contextlib.AsyncExitStack() as stack:
        sides = [await stack.enter_async_context(_filled(size)) for size in SIZES]
        until_s = time.monotonic() + 2 * seconds
        while time.monotonic() < until_s:
            for side in sides:
                await side.turn()
        rows = [row for side in sides for row in await side.rows()]
    bars = []
    for script in ("take", "charge", "ack", "sweep"):
        small, large = (row for row in rows if row["script"] == script)
        for name in ("p50", "p99"):
            ratio = large[f"{name}, us"] / small[f"{name}, us"]
            most = 1.5 if name == "p50" else 2.0
            bars.append(Bar(f"{script}: {name} behind {SIZES[1]:,} over {SIZES[0]:,}", ratio, most=most))
    lane_s = 10_000 * max(side.laned_us for side in sides) / 1e6
    bars.append(Bar("seconds in which 10,000 entries get their places", lane_s, most=1.0))
    return Measured(rows, bars)


@contextlib.asynccontextmanager
async def _filled(size: int) -> AsyncIterator[Side]:
    give_up_s = time.monotonic() + MOST_S
    with EmbeddedServer() as server:
        redis = connect(server.socket_url, decode=False)
        await ensure_group(redis, QUEUE)
        waiting = await _fill(redis, size, give_up_s)
        laned_us = await _lane(redis, give_up_s)
        await redis.config_set("slowlog-max-len", 100)
        await redis.config_set("slowlog-log-slower-than", 0)
        yield Side(redis, waiting, laned_us)
        await redis.aclose()


class Side:
    def __init__(self, redis: RedisClient, waiting: int, laned_us: float) -> None:
        self.laned_us = laned_us  # per entry
        self._redis = redis
        self._waiting = waiting
        self._hashes = {script_hash(str(command[1])): name for name, command in _commands().items()}
        self._found: dict[str, list[float]] = defaultdict(list)
        self._num_turns = 0

    async def turn(self) -> None:
        """Runs each script once."""
        redis = self._redis
        await redis.slowlog_reset()
        answer, *_ = await execute_one(redis, _take(COUNT))
        bills = [Bill(entry[0].decode(), _tenant(entry[3]), 20) for entry in answer]
        await execute_one(redis, scripts.charge(QUEUE, worker="w", bills=bills))
        await execute_one(redis, scripts.ack(QUEUE, worker="w", bills=bills))
        await execute_one(redis, scripts.sweep(QUEUE, worker="w", count=64, **LIMITS))
        for bill in bills:
            await execute_one(redis, _entry(int(bill.tenant[1:])))
        self._num_turns += 1
        for each in cast("Any", await redis.slowlog_get(100)):
            parts = each["command"].split()
            if parts[0] == b"EVALSHA" and parts[1].decode() in self._hashes and self._num_turns > 3:
                self._found[self._hashes[parts[1].decode()]].append(float(each["duration"]))

    async def rows(self) -> list[dict[str, Any]]:
        memory: Any = await self._redis.info("memory")
        return [
            {
                "script": name, "waiting": self._waiting, "runs": len(times), **_spread(times),
                "laned, us each": self.laned_us, "MB": memory["used_memory"] / 1e6,
            }
            for name, times in self._found.items()
        ]  # fmt: skip


async def _fill(redis: RedisClient, size: int, give_up_s: float) -> int:
    """Enqueues entries of all tenants in turn, in pages of the same bytes."""
    pool = cast("Any", redis).connection_pool
    connection = await pool.get_connection()
    page = b"".join(pack_command(cast("Any", _entry(place % TENANTS))) for place in range(PAGE))
    count = 0
    while count < size and time.monotonic() < give_up_s:
        await connection.send_packed_command([page])
        for _ in range(PAGE):
            await connection.read_response()
        count += PAGE
    await pool.release(connection)
    return count


def _entry(tenant: int) -> Command:
    return ("XADD", keys.requests(QUEUE), "*", "prompt", "hello there", "max_tokens", "1", "tenant", f"t{tenant}")


async def _lane(redis: RedisClient, give_up_s: float) -> float:
    """Gives all entries their places; returns microseconds per entry."""
    before = await _cpu_s(redis)
    has_more = True
    while has_more and time.monotonic() < give_up_s:
        _, has_more, _ = await execute_one(redis, _take(0))
    pending: Any = await redis.xpending(keys.requests(QUEUE), keys.GROUP)
    return 1e6 * (await _cpu_s(redis) - before) / max(1, int(pending["pending"]))


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
    return {"p50, us": p50, "p99, us": p99, "max": most}

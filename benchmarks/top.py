"""Measures what watching a queue costs Redis: looks of `penstock top` and of the operators' page, and workers' reports.

    python -m benchmarks.top

The setup is a server, full workers whose engine is a timer, and waiting requests of many tenants. Looks are taken
faster than anybody would. Their cost is the growth of the server's processor time over the same time without them.
Reports cannot be turned off, so their script is sent a second time, at the same rate. Medians over rounds. Appends to
`benchmarks/results/top.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.intake import cpu_s
from benchmarks.parts.tables import RESULTS, table_of
from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys, scripts
from penstock.protocol.operations.collector import look
from penstock.protocol.operations.reports import REMEMBERED_S, REPORT_INTERVAL_S
from penstock.protocol.redis.connection import RedisClient, connect, ensure_group
from penstock.protocol.redis.pipeline import execute, execute_one
from penstock.tools.bench.report import append_result
from penstock.tools.chaos.process import FakeWorker

QUEUE = "top"
PAGE = 1000
SLOTS = 16
LETTERS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="that wait")
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one measurement")
    parser.add_argument("--rate", type=float, default=50.0, help="looks a second, while they are measured")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments))
    result = {**vars(arguments), **figures}
    append_result(RESULTS / "top.jsonl", result)
    Console().print(table_of("top", [figures]))


async def measure(arguments: argparse.Namespace) -> dict[str, float]:
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as folder:
        redis = connect(server.url, decode=False)
        await ensure_group(redis, QUEUE)
        await enqueue(redis, arguments.requests + arguments.workers * SLOTS, arguments.tenants)
        config = {"queue": QUEUE, "health_port": None, "heartbeat_ttl_s": 10.0}
        engine = {"max_num_seqs": SLOTS, "step_s": 0.1}
        workers = [
            FakeWorker(server.url, Path(folder) / f"log{place}", engine, {**config, "name": f"w{place}"})
            for place in range(arguments.workers)
        ]
        await until_full(redis, arguments)
        report = await redis.get(keys.report(QUEUE, "w0")) or b""
        assert isinstance(report, bytes)

        async def say() -> None:
            listed_ms = round(REMEMBERED_S * 1000)
            said = scripts.report(QUEUE, worker="w0", text=report.decode(), ttl_ms=10_000, listed_ms=listed_ms)
            await execute_one(redis, said)

        rounds = [
            (await cost_us(redis, lambda: look(redis, QUEUE), arguments), await cost_us(redis, say, arguments))
            for _ in range(arguments.rounds)
        ]
        for worker in workers:
            worker.send(signal.SIGKILL)
        await redis.aclose()
    look_us, report_us = (median(each) for each in zip(*rounds, strict=True))
    return {
        "look_us": look_us,
        "report_us": report_us,
        "report_bytes": float(len(report)),
        "core_percent_at_1_hz": look_us / 1e4,
        "core_percent_of_reports": report_us / 1e4 * arguments.workers / REPORT_INTERVAL_S,
    }


async def enqueue(redis: RedisClient, num_requests: int, num_tenants: int) -> None:
    for start in range(0, num_requests, PAGE):
        page = range(start, min(start + PAGE, num_requests))
        await execute(
            redis,
            [
                ("XADD", keys.requests(QUEUE), "*", "prompt", "hello there" * 20, "max_tokens", 10**6, "tenant",
                 f"t{place % num_tenants}", "priority", place % 3)
                for place in page
            ],
        )  # fmt: skip
    letter = ("XADD", keys.dead(QUEUE), "*", "id", "r", "code", "too_many_crashes", "field:prompt", "hello" * 200)
    await execute(redis, [letter] * LETTERS)


async def until_full(redis: RedisClient, arguments: argparse.Namespace) -> None:
    """Waits until all slots run and all waiting entries have places."""
    while True:
        now = await look(redis, QUEUE)
        is_full = now.num_running == arguments.workers * SLOTS and len(now.running) == now.num_running
        if is_full and now.num_new == 0 and now.num_waiting == arguments.requests:
            return
        await asyncio.sleep(0.2)


async def cost_us(redis: RedisClient, work: Callable[[], Awaitable[Any]], arguments: argparse.Namespace) -> float:
    """Returns the server's processor time for one `work`, without what it spends anyway."""
    before = await spent_s(redis, arguments.seconds)
    count = round(arguments.seconds * arguments.rate)
    begun_s, begun_cpu_s = time.perf_counter(), await cpu_s(redis)
    for place in range(count):
        await asyncio.sleep(max(0.0, begun_s + place / arguments.rate - time.perf_counter()))
        await work()
    elapsed_s, used_s = time.perf_counter() - begun_s, await cpu_s(redis) - begun_cpu_s
    after = await spent_s(redis, arguments.seconds)
    idle_s = (before + after) / 2 * elapsed_s
    return float(1e6 * (used_s - idle_s) / count)


async def spent_s(redis: RedisClient, seconds: float) -> float:
    """Returns CPU seconds per second while nobody looks."""
    begun_s, begun_cpu_s = time.perf_counter(), await cpu_s(redis)
    await asyncio.sleep(seconds)
    return (await cpu_s(redis) - begun_cpu_s) / (time.perf_counter() - begun_s)


if __name__ == "__main__":
    main()

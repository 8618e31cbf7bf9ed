"""Measures what a queue costs: small requests through one worker whose engine takes no time, against another version of
Penstock.

    git worktree add ../before HEAD~1
    python -m benchmarks.intake --against ../before

Rounds alternate. Each starts a server, enqueues all requests, then starts the worker: requests per second until the
queue is empty, and processor time of the server per request, enqueueing left out. Medians over rounds. Appends to
`benchmarks/results/intake.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.parts.tables import RESULTS, table_of
from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect, ensure_group
from penstock.protocol.redis.pipeline import execute
from penstock.tools.bench.report import append_result
from penstock.tools.chaos.process import FakeWorker

QUEUE = "intake"
PAGE = 1000
SLOTS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="a checkout of another version")
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--tenants", type=int, default=1, help="that the requests are of, in turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)  # one round, in its own process
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(asyncio.run(measure(arguments.requests, arguments.tenants))))
        return
    sides = {"this": Path(__file__).parents[1]} | ({"other": arguments.against} if arguments.against else {})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, folder in sides.items():
            found[name].append(in_process(folder, arguments))
    figures = {name: {key: median(each[key] for each in runs) for key in runs[0]} for name, runs in found.items()}
    result: dict[str, Any] = {
        "requests": arguments.requests, "tenants": arguments.tenants, "rounds": arguments.rounds, **figures
    }  # fmt: skip
    if "other" in figures:
        rates, costs = ([figures[name][key] for name in ("this", "other")] for key in ("per_s", "redis_us"))
        result["rate_ratio"], result["redis_us_more"] = rates[0] / rates[1], costs[0] - costs[1]
    append_result(RESULTS / "intake.jsonl", result)
    rows = [{"version": name, **each} for name, each in figures.items()]
    Console().print(table_of("intake", rows))
    if "other" in figures:
        Console().print(
            f"{result['rate_ratio']:.3f} of its rate, {result['redis_us_more']:+.1f} us of Redis per request"
        )


def in_process(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Runs one round of the version in `folder`, with this file."""
    command = [sys.executable, __file__, "--once", "--requests", str(arguments.requests)]
    command += ["--tenants", str(arguments.tenants)]
    path = os.pathsep.join([str(folder.resolve()), str(Path(__file__).parents[1])])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=folder, check=True, capture_output=True, text=True
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


async def measure(num_requests: int, num_tenants: int) -> dict[str, float]:
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as logs:
        redis = connect(server.url, decode=False)
        await ensure_group(redis, QUEUE)
        bodies = [("prompt", "hello there", "max_tokens", "1", "tenant", f"t{i % num_tenants}") for i in range(PAGE)]
        for start in range(0, num_requests, PAGE):
            page = bodies[: num_requests - start]
            await execute(redis, [("XADD", keys.requests(QUEUE), "*", *body) for body in page])
        config = {"queue": QUEUE, "health_port": None, "reply_ttl_after_end_s": 60.0}
        worker = FakeWorker(server.url, Path(logs) / "log", {"max_num_seqs": SLOTS}, config)
        left = num_requests
        while left == num_requests:  # the worker is starting
            await asyncio.sleep(0.01)
            left = int(await redis.xlen(keys.requests(QUEUE)))
        begun_s, begun_cpu_s, first = time.perf_counter(), await cpu_s(redis), left
        while left:
            await asyncio.sleep(0.05)
            left = int(await redis.xlen(keys.requests(QUEUE)))
        seconds, spent_s = time.perf_counter() - begun_s, await cpu_s(redis) - begun_cpu_s
        worker.send(signal.SIGTERM)
        await asyncio.to_thread(worker.wait, 20)
        await redis.aclose()
    return {"per_s": first / seconds, "redis_us": 1e6 * spent_s / first}


async def cpu_s(redis: RedisClient) -> float:
    """Returns the server's CPU seconds so far."""
    info: Any = await redis.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


if __name__ == "__main__":
    main()

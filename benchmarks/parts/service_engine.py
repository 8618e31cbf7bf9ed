"""Runs the same load on the bare engine and through Redis: tokens per second, time to first token, a slow Redis."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from benchmarks.engine import loaded_engine, shared_load
from benchmarks.parts.service_process import ServerCosts, bench_client, worker_in_process
from benchmarks.parts.steady_engine import TimedEngine
from penstock.engine import Engine
from penstock.local.embedded import EmbeddedServer
from penstock.tools.bench.on_engine import run_on_engine
from penstock.tools.bench.presets import GEOMETRIES
from penstock.tools.bench.summary import Summary
from penstock.tools.bench.traffic.load import Load
from penstock.worker.service import Model

_ONLINE_SHARE = 0.4  # of the bare engine's requests per second: few have to wait
SLOWNESS = ((0.0, 1e9), (0.05, 1e9), (0.2, 1e9), (0.02, 200_000.0))  # seconds each way, bytes per second


def against_bare_engine(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs rounds of bare engine and service in turn: all requests at once, below capacity, one at a time."""
    engine, _ = loaded_engine(arguments)
    with EmbeddedServer() as server:
        _warm_up(engine, server, arguments)
        offline = _rounds(engine, server, arguments, {})
        rate = round(_ONLINE_SHARE * statistics.median(row["bare"]["requests_per_s"] for row in offline), 3)
        online = _rounds(engine, server, arguments, {"arrivals": "poisson", "rate": rate})
        few = argparse.Namespace(**{**vars(arguments), "requests": max(1, arguments.requests // 4)})
        alone = _rounds(engine, server, few, {"arrivals": "closed", "concurrency": 1})
    return [
        *_with_median("offline", "output tok/s", [_throughput(row) for row in offline]),
        *_with_median("online", "median TTFT, ms", [_latency(row) for row in online]),
        *_with_median("one at a time", "median TTFT, ms", [_latency(row) for row in alone]),
    ]


def with_slow_redis(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures how fast the engine runs, while it has work, as the worker's connections to Redis get slower."""
    engine, _ = loaded_engine(arguments)
    load = shared_load(arguments.model, arguments.requests)
    rows: list[dict[str, Any]] = []
    with EmbeddedServer() as server:
        for _ in range(arguments.rounds):
            undelayed_rate = 0.0
            for delay_s, bytes_per_s in SLOWNESS:
                bare = TimedEngine(engine)
                run_on_engine(bare, engine.tokenizer, load)
                timed, costs = TimedEngine(engine), ServerCosts(server)
                run = asyncio.run(_through_proxy(server, engine, timed, load_options(arguments), delay_s, bytes_per_s))
                bare_rate, rate = bare.num_tokens / bare.working_s, timed.num_tokens / timed.working_s
                undelayed_rate = undelayed_rate or rate
                rows.append({
                    "delay each way, ms": round(delay_s * 1000), "bytes/s": f"{bytes_per_s:,.0f}",
                    "bare engine, tok/s": round(bare_rate, 1), "engine in the worker, tok/s": round(rate, 1),
                    "ratio": round(rate / bare_rate, 3), "to undelayed": round(rate / undelayed_rate, 3),
                    "between steps": f"{1 - timed.in_steps_s / timed.working_s:.1%}",
                    "tokens per chunk": round(timed.num_tokens / max(1, costs.calls("xadd")), 2),
                    "client, tok/s": run["output_tokens_per_s"],
                })  # fmt: skip
    return rows


def load_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of `penstock bench serve` that make the same requests as `shared_load`."""
    return {"requests": arguments.requests, "vocab_size": GEOMETRIES[arguments.model].vocab_size}


def _warm_up(engine: Engine, server: EmbeddedServer, arguments: argparse.Namespace) -> None:
    """Warms up both sides and the client's process, so that no round includes first-time costs."""
    run_on_engine(engine, engine.tokenizer, shared_load(arguments.model, 8))
    few = {**load_options(arguments), "requests": 8}
    asyncio.run(_service(server, engine, few, arguments.flush_interval_ms))


def _rounds(
    engine: Engine, server: EmbeddedServer, arguments: argparse.Namespace, arrivals: dict[str, Any]
) -> list[dict[str, Any]]:
    load = shared_load(arguments.model, arguments.requests, **arrivals)
    found = []
    for place in range(arguments.rounds):
        bare: dict[str, Any] = {}
        for side in ("bare", "service") if place % 2 else ("service", "bare"):  # neither always goes first
            if side == "bare":
                bare = _bare(engine, load)
            else:
                options = {**load_options(arguments), **arrivals}
                service = asyncio.run(_service(server, engine, options, arguments.flush_interval_ms))
        found.append({"bare": bare, "service": service})
    return found


def _bare(engine: Engine, load: Load) -> dict[str, Any]:
    timed = TimedEngine(engine)
    summary = Summary.of(run_on_engine(timed, engine.tokenizer, load))
    assert summary.ttft_ms is not None
    return {
        "output_tokens_per_s": summary.output_tokens_per_s, "requests_per_s": summary.requests_per_s,
        "ttft_ms": summary.ttft_ms.p50, "engine_rate": timed.num_tokens / timed.working_s,
    }  # fmt: skip


async def _service(
    server: EmbeddedServer, engine: Engine, options: dict[str, Any], flush_interval_ms: int
) -> dict[str, Any]:
    timed, costs = TimedEngine(engine), ServerCosts(server)
    model = Model(timed, engine.tokenizer, engine.defaults)
    async with worker_in_process(server.url, model, flush_interval_ms=flush_interval_ms):
        before_s = time.thread_time()
        run = await bench_client(server.url, **options)
        loop_cpu_s = time.thread_time() - before_s
    beside_s = loop_cpu_s + costs.cpu_s + run["cpu_s"]
    return {
        **run, "num_chunks": costs.calls("xadd"), "loop_cpu_s": loop_cpu_s, "redis_cpu_s": costs.cpu_s,
        "left_for_engine": 1 - beside_s / run["seconds"] / len(os.sched_getaffinity(0)),
        "engine_rate": timed.num_tokens / timed.working_s,
    }  # fmt: skip


async def _through_proxy(
    server: EmbeddedServer, engine: Engine, timed: TimedEngine, options: dict[str, Any], delay_s: float, rate: float
) -> dict[str, Any]:
    model = Model(timed, engine.tokenizer, engine.defaults)
    async with slow_proxy(server.port, delay_s, rate) as url, worker_in_process(url, model, drain_timeout_s=30.0):
        return await bench_client(server.url, **options)


@contextlib.asynccontextmanager
async def slow_proxy(port: int, delay_s: float, bytes_per_s: float) -> AsyncIterator[str]:
    """Yields the URL of a slow way to the server on `port`; another process carries the bytes."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.parts.slow_proxy", "127.0.0.1", str(port), str(delay_s), str(bytes_per_s),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"redis://127.0.0.1:{int(await process.stdout.readline())}/0"
    finally:
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 5)
        if process.returncode is None:
            process.kill()
            await process.wait()


def _throughput(row: dict[str, Any]) -> dict[str, Any]:
    bare, service = row["bare"], row["service"]
    return {
        "bare": bare["output_tokens_per_s"], "service": service["output_tokens_per_s"],
        "ratio or difference": round(service["output_tokens_per_s"] / bare["output_tokens_per_s"], 3),
        **_costs(bare, service),
    }  # fmt: skip


def _latency(row: dict[str, Any]) -> dict[str, Any]:
    bare, service = row["bare"], row["service"]
    return {
        "bare": bare["ttft_ms"], "service": service["ttft_ms"]["p50"],
        "ratio or difference": round(service["ttft_ms"]["p50"] - bare["ttft_ms"], 3),
        **_costs(bare, service),
    }  # fmt: skip


def _costs(bare: dict[str, Any], service: dict[str, Any]) -> dict[str, Any]:
    """Returns processor time outside the engine, which a busy machine distorts little, and the share of cores left."""
    num_tokens = service["output_tokens"]
    return {
        "engine's own rate, ratio": round(service["engine_rate"] / bare["engine_rate"], 3),
        "tokens per chunk": round(num_tokens / max(1, service["num_chunks"]), 2),
        "CPU us/token: worker's loop": round(1e6 * service["loop_cpu_s"] / num_tokens, 1),
        "Redis": round(1e6 * service["redis_cpu_s"] / num_tokens, 1),
        "client": round(1e6 * service["cpu_s"] / num_tokens, 1),
        "of all cores left": round(service["left_for_engine"], 3),
    }


def _with_median(name: str, what: str, rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    median = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
    rows = [{"round": f"{name} {place}, {what}", **found} for place, found in enumerate(rounds, start=1)]
    return [*rows, {"round": f"{name}, medians, {what}", **median}]

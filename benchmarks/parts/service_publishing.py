"""Measures how many chunks one worker process writes, against a bare pipeline of redis-py with the same fields."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from redis import Redis

from benchmarks.parts.service_process import ServerCosts, preload, until, worker_in_process
from benchmarks.parts.steady_engine import SteadyEngine, steady_model
from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys

NUM_SEQS = 512
STEPS_S = (0.002, 0.003, 0.006)  # the engine offers more than can be written, about as much, and less
SECONDS = 2.0
_ENDLESS = 1_000_000


def against_bare_pipeline(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures per round a bare pipeline, then workers that flush without delay, with engines of several speeds."""
    rows: list[dict[str, Any]] = []
    for place in range(1, arguments.rounds + 1):
        with EmbeddedServer() as server:
            bare = bare_rate(server)
            for step_s in STEPS_S:
                worker = asyncio.run(_worker(server, step_s, flush_interval_ms=0))
                again = bare_rate(server)  # the machine's other load changes from second to second
                rate, bare = (bare["chunks"] + again["chunks"]) / 2, again
                rows.append(_row(f"{place}", rate, bare["cpu_us"], worker))
            coalesced = asyncio.run(_worker(server, STEPS_S[0], flush_interval_ms=30))
            rows.append(_row(f"{place}, joined for 30 ms", bare["chunks"], bare["cpu_us"], coalesced))
    return rows


def bare_rate(server: EmbeddedServer) -> dict[str, float]:
    """Returns chunks per second of redis-py's own pipeline: 512 per flush, one flush after the other."""
    client = Redis.from_url(server.url)
    number, start, cpu_s = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < SECONDS:
        number += 1
        pipeline = client.pipeline(transaction=False)
        for key, fields in _chunks(number):
            pipeline.xadd(key, fields, id=f"1-{number}")
        pipeline.execute()
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
    client.delete(*(key for key, _ in _chunks(0)))
    client.close()
    return {"chunks": number * NUM_SEQS / seconds, "cpu_us": 1e6 * cpu_s / number / NUM_SEQS}


def _chunks(number: int) -> list[tuple[str, Any]]:
    fields = {"type": "chunk", "index": "0", "offset": str(number), "text": " word", "tokens": str(number % 1000)}
    return [(keys.reply("publishing", f"1700000000000-{place}"), fields) for place in range(NUM_SEQS)]


async def _worker(server: EmbeddedServer, step_s: float, *, flush_interval_ms: int) -> dict[str, float]:
    """Returns rates while all sequences run, as counted by the server."""
    await preload(server.url, NUM_SEQS, _ENDLESS)
    engine = SteadyEngine(NUM_SEQS, step_s)
    model = steady_model(engine)
    async with worker_in_process(server.url, model, flush_interval_ms=flush_interval_ms, drain_timeout_s=0.0):
        await until(lambda: engine.stats().num_running == NUM_SEQS)
        await asyncio.sleep(0.5)
        costs, cpu_s = ServerCosts(server), time.process_time()
        generated = engine.stats().generated_tokens_total
        await asyncio.sleep(SECONDS)
        seconds, num_chunks, redis_s = costs.seconds, costs.calls("xadd"), costs.cpu_s
        cpu_s = time.process_time() - cpu_s
        generated = engine.stats().generated_tokens_total - generated
    with Redis.from_url(server.url) as client:
        client.flushall()
    return {
        "chunks": num_chunks / seconds, "tokens": generated / seconds,
        "cpu_us": 1e6 * cpu_s / num_chunks, "redis_us": 1e6 * redis_s / num_chunks,
    }  # fmt: skip


def _row(name: str, bare_rate: float, bare_cpu_us: float, worker: dict[str, float]) -> dict[str, Any]:
    return {
        "round": name,
        "bare redis-py, chunks/s": round(bare_rate),
        "worker, chunks/s": round(worker["chunks"]),
        "ratio": round(worker["chunks"] / bare_rate, 3),
        "its tokens/s": round(worker["tokens"]),
        "CPU us/chunk: bare": round(bare_cpu_us, 1),
        "worker": round(worker["cpu_us"], 1),
        "Redis": round(worker["redis_us"], 1),
    }

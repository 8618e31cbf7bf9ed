"""Measures what readers cost Redis, by number of connections, and whether one client keeps up with 1,000 replies."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from benchmarks.parts.service_process import ServerCosts, bench_client, preload, until, worker_in_process
from benchmarks.parts.steady_engine import SteadyEngine, steady_model
from penstock.local.embedded import EmbeddedServer

NUM_REPLIES = 256
NUM_TOKENS = 100
STEP_S = 0.04
MANY_REPLIES = 1000


def cost_of_readers(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures without readers, then with one client that reads everything, then with more and more clients."""
    rows = []
    for _ in range(arguments.rounds):
        with EmbeddedServer() as server:
            unread = asyncio.run(_unread(server))
            rows.append(_row("nobody", unread, unread))
        for num_clients in (1, 16, NUM_REPLIES):
            with EmbeddedServer() as server:
                read = asyncio.run(_read(server, NUM_REPLIES, num_clients))
                rows.append(_row(f"{num_clients} clients, {NUM_REPLIES} replies", read, unread))
        with EmbeddedServer() as server:
            many = asyncio.run(_read(server, MANY_REPLIES, 1))
            rows.append(_row(f"1 client, {MANY_REPLIES} replies", many, unread))
    return rows


async def _unread(server: EmbeddedServer) -> dict[str, float]:
    engine = SteadyEngine(NUM_REPLIES, STEP_S)
    async with worker_in_process(server.url, steady_model(engine)):
        costs = ServerCosts(server)
        await preload(server.url, NUM_REPLIES, NUM_TOKENS)
        await until(lambda: engine.stats().generated_tokens_total == NUM_REPLIES * NUM_TOKENS)
        await asyncio.sleep(0.2)  # the last chunks
        return _costs(costs, {})


async def _read(server: EmbeddedServer, num_replies: int, num_clients: int) -> dict[str, float]:
    engine = SteadyEngine(num_replies, STEP_S)
    async with worker_in_process(server.url, steady_model(engine)):
        costs = ServerCosts(server)
        run = await bench_client(
            server.url, requests=num_replies, clients=num_clients, prompt_length="8", output_length=str(NUM_TOKENS),
            vocab_size=1000,
        )  # fmt: skip
        return _costs(costs, run)


def _costs(costs: ServerCosts, run: dict[str, Any]) -> dict[str, float]:
    itl = run.get("itl_ms") or {"p50": 0.0, "p99": 0.0}
    return {
        "cpu_s": costs.cpu_s, "chunks": costs.calls("xadd"), "reads": costs.calls("xread"),
        "client_cpu_s": run.get("cpu_s", 0.0), "seconds": run.get("seconds", 0.0),
        "itl_p50": itl["p50"], "itl_p99": itl["p99"], "at": time.time(),
    }  # fmt: skip


def _row(name: str, found: dict[str, float], unread: dict[str, float]) -> dict[str, Any]:
    per_chunk, unread_per_chunk = (1e6 * each["cpu_s"] / each["chunks"] for each in (found, unread))
    return {
        "readers": name,
        "chunks": int(found["chunks"]),
        "XREADs": int(found["reads"]),
        "Redis CPU, us per chunk": round(per_chunk, 1),
        "of it for reading": round(per_chunk - unread_per_chunk, 1),
        "client CPU, us per chunk": round(1e6 * found["client_cpu_s"] / found["chunks"], 1),
        "seconds": round(found["seconds"], 2),
        "ITL p50, ms": round(found["itl_p50"], 1),
        "ITL p99, ms": round(found["itl_p99"], 1),
    }

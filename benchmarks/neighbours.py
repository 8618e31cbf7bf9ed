"""Measures what one request's work does to others: the longest gap of streams, and first tokens of short prompts.

    python -m benchmarks.neighbours

A server, a worker (`tiny`, bfloat16, steps of 256 tokens) and a gateway, each in a process of its own. Streams run
through the gateway, prompts of 20 tokens come through Redis one after the other, and another process does the work of
`neighbour_work.py`, one kind after the other. A step is the time of a prompt of 256 tokens alone. Bars, on two quiet
cores: a gap at most 0.25 s beyond one step, the short prompt at most 3 steps later than without other work, and no
heartbeat late. Appends to `benchmarks/results/neighbours.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
from rich.console import Console

from benchmarks.parts.neighbour_work import TEMPLATE, VOCAB_SIZE, WORK, Site, do, words
from benchmarks.parts.tables import RESULTS, table_of
from penstock.local.embedded import EmbeddedServer
from penstock.local.gateway_process import local_gateway
from penstock.local.worker_process import local_worker, wait_joined
from penstock.producer import AsyncClient
from penstock.protocol import keys
from penstock.protocol.redis.connection import connect
from penstock.protocol.tasks import end_tasks
from penstock.tools.bench.presets import preset_dir, preset_root
from penstock.tools.bench.report import append_result
from penstock.worker.presence.heartbeat import BEATS_PER_TTL

QUEUE, NAME = "neighbours", "w"
CONTEXT, STEP_TOKENS, SHORT_TOKENS = 65_536, 256, 20
TTL_S = 3.0
PAUSE_S = 0.3  # between two short prompts
AFTER_S = 1.5  # watched after the work is done
GAP_BAR_S, SHORT_BAR_STEPS, BEAT_BAR_S = 0.25, 3, 0.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--work", nargs="*", choices=list(WORK), default=list(WORK), metavar="KIND")
    parser.add_argument("--prefill-share", type=float, default=None, help="of the worker; as shipped by default")
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments))
    append_result(RESULTS / "neighbours.jsonl", {"options": vars(arguments), "rows": rows})
    Console().print(table_of(f"{arguments.model} {arguments.dtype}, seconds", rows))


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        site = await _site(stack, arguments)
        pool = stack.enter_context(_one_process())
        client = await stack.enter_async_context(AsyncClient(site.redis_url, queue=QUEUE))
        step_s = max([await _first_token_s(client, STEP_TOKENS) for _ in range(5)][2:])
        quiet = (await _watched(site, client, pool, "nothing", arguments.streams)).figures()
        for name in arguments.work:
            found = (await _watched(site, client, pool, name, arguments.streams)).figures()
            rows.append({"beside": name, "step": step_s, **found, "misses": _misses(found, quiet, step_s)})
            Console(stderr=True).print(rows[-1])
    return rows


def _misses(found: dict[str, float], quiet: dict[str, float], step_s: float) -> str:
    late = {
        "gap": found["longest gap"] > GAP_BAR_S + step_s,
        "short prompt": found["short prompt, longest"] > quiet["short prompt, longest"] + SHORT_BAR_STEPS * step_s,
        "heartbeat": found["heartbeat late by"] > BEAT_BAR_S,
    }
    return ", ".join(name for name, is_late in late.items() if is_late)


class Watch:
    """Records when tokens and beats come."""

    def __init__(self) -> None:
        self.gaps_s: list[float] = []
        self.firsts_s: list[float] = []
        self.silence_s = 0.0
        self.work_s = 0.0

    def figures(self) -> dict[str, float]:
        return {
            "work": self.work_s,
            "gap p50": statistics.median(self.gaps_s),
            "longest gap": max(self.gaps_s),
            "short prompt p50": statistics.median(self.firsts_s),
            "short prompt, longest": max(self.firsts_s),
            "heartbeat late by": max(0.0, self.silence_s - TTL_S / BEATS_PER_TTL),
        }

    async def stream(self, site: Site, place: int, started: Callable[[], None]) -> None:
        body = {"model": site.model, "prompt": [place + 1] * 8, "max_tokens": CONTEXT // 2, "stream": True,
                "ignore_eos": True, "logit_bias": {site.word: 100}}  # fmt: skip
        url = f"{site.gateway_url}/v1/completions"
        async with httpx.AsyncClient(timeout=None) as http, http.stream("POST", url, json=body) as answer:
            answer.raise_for_status()
            last_s = 0.0
            async for _ in answer.aiter_raw():
                now_s = time.perf_counter()
                if last_s:
                    self.gaps_s.append(now_s - last_s)
                else:
                    started()
                last_s = now_s
        raise RuntimeError("a stream ended before what was to be measured")

    async def ask(self, client: AsyncClient) -> None:
        while True:
            self.firsts_s.append(await _first_token_s(client, SHORT_TOKENS))
            await asyncio.sleep(PAUSE_S)

    async def listen(self, site: Site) -> None:
        redis = connect(site.redis_url, decode=False)
        try:
            while True:
                left_ms = await redis.pttl(keys.heartbeat(QUEUE, NAME))
                self.silence_s = max(self.silence_s, TTL_S - left_ms / 1000)
                await asyncio.sleep(0.05)
        finally:
            await redis.aclose()


async def _watched(site: Site, client: AsyncClient, pool: Executor, name: str, num_streams: int) -> Watch:
    """Runs one kind of work, beside streams that run before, during and after it."""
    watch, run = Watch(), asyncio.Semaphore(0)
    async with _tasks(*(watch.stream(site, place, run.release) for place in range(num_streams))):
        for _ in range(num_streams):
            await run.acquire()
        await asyncio.sleep(AFTER_S)
        watch.gaps_s.clear()
        async with _tasks(watch.ask(client), watch.listen(site)):
            watch.work_s = await asyncio.get_running_loop().run_in_executor(pool, do, name, site)
            await asyncio.sleep(AFTER_S)
    return watch


@contextlib.asynccontextmanager
async def _tasks(*works: Any) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        await end_tasks(tasks)


async def _first_token_s(client: AsyncClient, num_tokens: int) -> float:
    """Times the first token of a prompt with a unique beginning."""
    prompt = tuple(random.randrange(1, VOCAB_SIZE) for _ in range(num_tokens))
    start_s = time.perf_counter()
    await client.generate(prompt, max_tokens=1, timeout=600.0)
    return time.perf_counter() - start_s


async def _site(stack: AsyncExitStack, arguments: argparse.Namespace) -> Site:
    server = stack.enter_context(EmbeddedServer())
    model = stack.enter_context(_checkpoint(arguments.model, arguments.dtype))
    port, gateways_port = _free_port(), _free_port()
    settings = {
        "queue": QUEUE, "name": NAME, "model": model, "dtype": arguments.dtype, "max_model_len": CONTEXT,
        "max_batch_tokens": STEP_TOKENS, "kv_cache_bytes": "2GiB", "max_n": 16, "heartbeat_ttl_s": TTL_S,
        "health_port": port, "chat_format": "hermes", "log_level": "error",
        "compile_cache_dir": preset_root().parent / "compile",
    }  # fmt: skip
    if arguments.prefill_share is not None:
        settings["prefill_share"] = arguments.prefill_share
    worker = await stack.enter_async_context(local_worker(server.url, settings))
    await wait_joined(worker, server.url, QUEUE, NAME)
    gateway_url = await stack.enter_async_context(local_gateway(server.url, metrics_port=gateways_port))
    async with httpx.AsyncClient() as http:
        name = (await http.get(f"{gateway_url}/v1/models")).json()["data"][0]["id"]
        tokens = (await http.post(f"{gateway_url}/tokenize", json={"model": name, "prompt": "word"})).json()["tokens"]
    return Site(
        server.url,
        QUEUE,
        name,
        str(tokens[-1]),
        gateway_url,
        tuple(f"http://127.0.0.1:{each}/metrics" for each in (port, gateways_port)),
    )


@contextlib.contextmanager
def _checkpoint(model: str, dtype: str) -> Iterator[Path]:
    """Copies the preset, with a longer context and a template that shows tools and can be made to loop."""
    preset = preset_dir(model, dtype, preset_root())
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / preset.name
        made.mkdir()
        for path in preset.iterdir():
            (made / path.name).symlink_to(path)
        _replace(made / "config.json", json.dumps({**json.loads((preset / "config.json").read_text()),
                                                   "max_position_embeddings": CONTEXT}))  # fmt: skip
        _replace(made / "chat_template.jinja", TEMPLATE)
        yield made


def _replace(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)


def _one_process() -> ProcessPoolExecutor:
    """Starts the process for the work, and does its imports."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    pool.submit(words, 1).result()
    return pool


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    main()

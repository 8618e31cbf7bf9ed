"""The sides that `benchmarks.gateway` compares, and the processes that they run in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from benchmarks.parts.service_process import QUEUE, process_cpu_s, worker_in_process
from benchmarks.parts.steady_engine import SteadyEngine, steady_model
from penstock.local.embedded import EmbeddedServer, dies_with_parent
from penstock.producer import AsyncClient
from penstock.worker.logs import configure_logs

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
NUM_STREAMS = 64
NUM_LATENCIES = 150  # on each side, per round


class Site(NamedTuple):
    """A gateway in front of a worker, both running."""

    redis_url: str
    port: int
    gateway_pid: int


class Run(NamedTuple):
    first_s: float  # to the first text
    num_chunks: int


async def latency(rounds: int) -> list[dict[str, Any]]:
    rows = []
    async with _site(step_s=0.005) as site, AsyncClient(site.redis_url, queue=QUEUE) as client:
        for number in range(rounds):
            native: list[float] = []
            over_http: list[float] = []
            for _ in range(NUM_LATENCIES):
                native.append((await _native(client, 4)).first_s)
                over_http.append((await _over_http(site.port, 4)).first_s)
            rows.append({"round": number + 1, **_both(native, over_http, 0.5), **_both(native, over_http, 0.95)})
    return rows


def _both(native: list[float], over_http: list[float], share: float) -> dict[str, float]:
    ours, theirs = (1000 * statistics.quantiles(each, n=100)[round(100 * share) - 1] for each in (over_http, native))
    name = f"p{round(100 * share)}"
    return {f"native {name} ms": theirs, f"gateway {name} ms": ours, f"added {name} ms": ours - theirs}


async def streams(rounds: int) -> list[dict[str, Any]]:
    rows = []
    async with _site(step_s=0.01) as site, AsyncClient(site.redis_url, queue=QUEUE) as client:
        for number in range(rounds):
            native = await _tokens_per_s(lambda: _native(client, 300), 300)
            over_http = await _tokens_per_s(lambda: _over_http(site.port, 300), 300)
            rows.append({"round": number + 1, "native": native, "gateway": over_http, "ratio": over_http / native})
    return rows


async def _tokens_per_s(ask: Callable[[], Awaitable[Run]], num_tokens: int) -> float:
    start = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(NUM_STREAMS)))
    return NUM_STREAMS * num_tokens / (time.perf_counter() - start)


async def chunks(rounds: int) -> list[dict[str, Any]]:
    """Compares CPU time per chunk. Each token is a chunk, as none are joined, and they come faster than the gateway
    serves.
    """
    rows = []
    async with _site(step_s=0.002, flush_interval_ms=0) as site, _bare_server() as (bare_port, bare_pid):
        for number in range(rounds):
            ours = await _cpu_per_chunk(site.port, site.gateway_pid, 400)
            bare = await _cpu_per_chunk(bare_port, bare_pid, 2000)
            rows.append({"round": number + 1, "gateway us": ours, "bare us": bare, "rate to bare": bare / ours})
    return rows


async def _cpu_per_chunk(port: int, pid: int, num_tokens: int) -> float:
    """Returns microseconds per chunk."""
    before = process_cpu_s(pid)
    runs = await asyncio.gather(*(_over_http(port, num_tokens) for _ in range(NUM_STREAMS)))
    return 1e6 * (process_cpu_s(pid) - before) / sum(run.num_chunks for run in runs)


async def _native(client: AsyncClient, num_tokens: int) -> Run:
    start = time.perf_counter()
    first_s, num_chunks = 0.0, 0
    async for _ in client.stream(MESSAGES, max_tokens=num_tokens):
        first_s = first_s or time.perf_counter() - start
        num_chunks += 1
    return Run(first_s, num_chunks)


async def _over_http(port: int, num_tokens: int) -> Run:
    """Sends a request; looks for text in the bytes that arrive."""
    body = json.dumps({"model": QUEUE, "messages": MESSAGES, "max_tokens": num_tokens, "stream": True}).encode()
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    first_s, num_chunks = 0.0, 0
    while line := await reader.readline():
        if b'"content":' in line.replace(b'"content":""', b""):
            first_s = first_s or time.perf_counter() - start
            num_chunks += 1
    writer.close()
    if not num_chunks:
        raise RuntimeError("the answer has no text")
    return Run(first_s, num_chunks)


@contextlib.asynccontextmanager
async def _site(**worker: Any) -> AsyncIterator[Site]:
    port = _free_port()
    gateway = ("-m", "penstock", "gateway", "--port", str(port), "--log-level", "error")
    with EmbeddedServer() as server:
        async with (
            _process("-m", "benchmarks.parts.gateway_sides", "worker", server.url, json.dumps(worker)),
            _process(*gateway, "--redis-url", server.url) as pid,
        ):
            await _until_it_answers(port)
            yield Site(server.url, port, pid)


@contextlib.asynccontextmanager
async def _bare_server() -> AsyncIterator[tuple[int, int]]:
    port = _free_port()
    async with _process("-m", "benchmarks.parts.gateway_sides", "bare", str(port)) as pid:
        await _until_it_answers(port)
        yield port, pid


@contextlib.asynccontextmanager
async def _process(*arguments: str) -> AsyncIterator[int]:
    process = await asyncio.create_subprocess_exec(*dies_with_parent(), sys.executable, *arguments)
    try:
        yield process.pid
    finally:
        process.terminate()
        await process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


async def _until_it_answers(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError, RuntimeError):
            await _over_http(port, 1)
            return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"nothing answers at port {port}")


async def _work(url: str, options: dict[str, Any]) -> None:
    configure_logs("error", "console", sys.stderr)
    engine = SteadyEngine(2 * NUM_STREAMS, options.pop("step_s"))
    async with worker_in_process(url, steady_model(engine), **options):
        await asyncio.Event().wait()


async def _stream_from_memory(asked: Request) -> Response:
    """Streams the same events as the gateway."""
    num_tokens = (await asked.json())["max_tokens"]

    async def events() -> AsyncIterator[bytes]:
        for number in range(num_tokens):
            await asyncio.sleep(0)  # as between two chunks that arrive separately
            document = {
                "id": "chatcmpl-rAbCdEfGhIjKlMnOpQrStUvWx",
                "object": "chat.completion.chunk",
                "created": 1795298400,
                "model": QUEUE,
                "system_fingerprint": None,
                "choices": [{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}],
            }
            yield f"id: 1795298400000000-{number}.0\ndata: {json.dumps(document)}\n\n".encode()

    return StreamingResponse(events(), media_type="text/event-stream")


def main() -> None:
    what, where, *options = sys.argv[1:]
    if what == "worker":
        asyncio.run(_work(where, json.loads(options[0])))
    else:
        app = Starlette(routes=[Route(CHAT, _stream_from_memory, methods=["POST"])])
        uvicorn.run(app, port=int(where), http="httptools", log_level="error")


if __name__ == "__main__":
    main()

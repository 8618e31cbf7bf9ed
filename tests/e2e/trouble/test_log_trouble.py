"""With a log that can't be written to, worker and gateway start, serve, drain, and exit with 0."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx2
import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import EndEntry
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S, eventually, slow
from tests.support.processes import ended
from tests.support.programs.worker_harness import read_reply, send

WORKER = (
    str(ROOT / "tests/support/programs/fake_service.py"),
    "worker",
    "--model",
    "fake",
    "--queue",
    "q",
    "--health-port",
    "none",
)
GATEWAY = ("-m", "penstock", "gateway")


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def nobody_reads() -> int:
    """Opens a pipe that is full."""
    reader, writer = os.pipe()
    os.set_inheritable(reader, False)
    _KEPT.append(reader)
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writer, True)
        return writer


def reader_is_gone() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


_KEPT: list[int] = []
SINKS: dict[str, Callable[[], int] | None] = {
    "full disk": full_disk, "nobody reads": nobody_reads, "reader is gone": reader_is_gone, "closed": None,
}  # fmt: skip


@asynccontextmanager
async def started(sink: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Starts a program with that as its stderr; where stderr is closed, stdout is too."""
    make = SINKS[sink]
    stderr = subprocess.DEVNULL if make is None else make()
    command = [sys.executable, *arguments]
    if make is None:
        command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    if stderr >= 0:
        os.close(stderr)
    try:
        yield process
    finally:
        await ended(process)
        while _KEPT:
            os.close(_KEPT.pop())


async def stopped(process: asyncio.subprocess.Process) -> int:
    process.send_signal(signal.SIGTERM)
    return await asyncio.wait_for(process.wait(), WAIT_S)


@pytest.mark.parametrize("sink", ["full disk", slow("nobody reads"), slow("reader is gone"), slow("closed")])
async def test_a_worker_serves_without_its_log(sink: str, redis: RedisClient, redis_url: str) -> None:
    async with started(sink, *WORKER, "--redis-url", redis_url, "--log-level", "debug") as process:
        await send(redis, prompt="x", id="r", max_tokens=3)
        assert isinstance((await read_reply(redis, "r")).end, EndEntry)
        await send(redis, prompt="x", id="unfinished", max_tokens=10**6)

        async def runs() -> bool:
            return bool(await redis.exists(keys.reply("q", "unfinished")))

        await eventually(runs)
        process.send_signal(signal.SIGTERM)
        await redis.set(keys.cancel("q", "unfinished"), 1)
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0


@pytest.mark.parametrize("num_processes", ["1", slow("2")])
@pytest.mark.parametrize("sink", ["nobody reads", slow("full disk"), slow("reader is gone"), "closed"])
async def test_a_gateway_serves_without_its_log(sink: str, num_processes: str, redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = ("--redis-url", redis_url, "--port", str(port), "--workers", num_processes, "--log-format", "json")
    async with started(sink, *GATEWAY, *arguments) as process, httpx2.AsyncClient(timeout=WAIT_S) as http:

        async def answers() -> bool:
            try:
                return (await http.get(f"http://127.0.0.1:{port}/readiness")).status_code == 200
            except httpx2.HTTPError:
                assert process.returncode is None
                return False

        await eventually(answers)
        assert (await http.get(f"http://127.0.0.1:{port}/v1/models")).status_code in (200, 503)
        assert await stopped(process) == 0

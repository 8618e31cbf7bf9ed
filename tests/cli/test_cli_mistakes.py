"""Newcomers' mistakes, with the real command: it says at once what is wrong, and what to do."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.local.embedded import EmbeddedServer
from tests.cli.cli_process import Outcome, finish, penstock, start
from tests.support.patience import WAIT_S, slow

WORKER = (
    *("worker", "--model", "demo", "--max-num-seqs", "8", "--max-batch-tokens", "64", "--num-pages", "520"),
    *("--health-port", "0"),
)


@pytest.fixture
def redis_url() -> Iterator[str]:
    """URL of one server, which is enough here: what depends on its kind is tested elsewhere."""
    with EmbeddedServer() as server:
        yield server.url


@pytest.fixture
def guarded() -> Iterator[EmbeddedServer]:
    """A server that wants a password."""
    with EmbeddedServer(arguments=("--requirepass", "right")) as server:
        yield server


def last_line(outcome: Outcome) -> dict[str, Any]:
    assert "Traceback" not in outcome.err
    line: dict[str, Any] = json.loads(outcome.err.splitlines()[-1])
    return line


async def read_until(process: asyncio.subprocess.Process, event: str) -> dict[str, Any]:
    """Returns the first line of `event` in the worker's log."""
    assert process.stderr is not None
    async with asyncio.timeout(WAIT_S):
        while line := await process.stderr.readline():
            if (entry := json.loads(line))["event"] == event:
                return dict(entry)
    raise AssertionError(f"the worker ended before {event!r}")


@pytest.mark.parametrize(
    ("user", "hint"), [(":wrong@", "check user and password"), slow("", "the server wants a password: put it into")]
)
async def test_a_wrong_password_ends_a_worker_before_anything_is_loaded(
    guarded: EmbeddedServer, user: str, hint: str
) -> None:
    outcome = await penstock(*WORKER, REDIS_URL=guarded.url.replace("://", f"://{user}"))
    last = last_line(outcome)
    assert (outcome.status, last["event"], last["level"], last["exit_status"]) == (5, "worker_failed", "critical", 5)
    assert hint in last["error"]
    assert "loading" not in outcome.err
    assert "wrong" not in outcome.err


async def test_on_a_console_the_reason_is_one_plain_line(guarded: EmbeddedServer) -> None:
    outcome = await penstock(*WORKER, "--log-format", "console", REDIS_URL=guarded.url)
    assert outcome.status == 5
    assert outcome.err.splitlines()[-1].startswith("penstock: Redis refuses what a worker must do: Authentication req")


async def test_without_redis_it_says_so_once_and_waits() -> None:
    process = await start(*WORKER, REDIS_URL="redis://user:hunter2@127.0.0.1:1")
    line = await read_until(process, "redis_unavailable")
    assert line["redis"] == "redis://127.0.0.1:1/0"
    assert "start it with redis-server" in line["hint"]
    assert process.returncode is None
    process.send_signal(signal.SIGTERM)
    outcome = await finish(process)
    assert (outcome.status, outcome.out) == (0, "")
    assert "redis_unavailable" not in outcome.err
    assert "hunter2" not in outcome.err


@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGTERM)])
async def test_a_signal_while_jax_is_imported_ends_it_at_once(redis_url: str, number: signal.Signals) -> None:
    process = await start(*WORKER, "--compile-cache-dir", "none", REDIS_URL=redis_url)
    await read_until(process, "loading the model")
    process.send_signal(number)
    outcome = await finish(process)
    assert (outcome.status, "Traceback" in outcome.err) == (0, False)


async def test_without_a_compiler_it_says_what_serves_instead(redis_url: str, tmp_path: Path) -> None:
    process = await start(*WORKER, "--compile-cache-dir", "none", PATH=str(tmp_path), REDIS_URL=redis_url)
    started = await read_until(process, "worker_started")
    warning = await read_until(process, "no_native_kernels")
    process.send_signal(signal.SIGTERM)
    outcome = await finish(process)
    assert outcome.status == 0
    assert (started["attention"], started["matmul"], started["device"]) == ("xla", "xla", "cpu")
    assert (started["model"], started["queue"], started["redis"]) == ("demo", "default", redis_url)
    assert started["kv_cache_tokens"] == 519 * 32
    assert warning["level"] == "warning"
    assert "no C++ compiler" in warning["why"]
    assert "apt install g++" in warning["hint"]

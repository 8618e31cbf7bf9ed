"""`penstock drain` works over Redis, from anywhere."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from penstock.cli import run
from penstock.protocol import keys
from penstock.protocol.operations.draining import presence
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import read_reply, read_until, running_worker, send
from tests.support.programs.worker_process import WorkerProcess


async def penstock(redis_url: str, *arguments: str) -> int:
    return await asyncio.to_thread(run, [*arguments, "--redis-url", redis_url, "--queue", "q"])


def is_chunk(entry: object) -> bool:
    return getattr(entry, "type", None) == "chunk"


async def has_read(redis: RedisClient, name: str) -> bool:
    """Checks whether the group knows the worker, as it does from the worker's first read on."""
    return name in [consumer["name"] for consumer in await redis.xinfo_consumers(keys.requests("q"), keys.GROUP)]


async def test_drain_hands_over_and_reports(
    redis_url: str, redis: RedisClient, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_worker(redis_url, FakeEngine(step_s=0.005), name="first", drain_timeout_s=0.1) as first:
        await send(redis, prompt="x", id="x", max_tokens=300)
        await read_until(redis, "x", is_chunk)
        async with running_worker(redis_url, name="second"):
            await eventually(lambda: has_read(redis, "second"))
            assert await penstock(redis_url, "drain", "first", "--no-wait") == 0
            assert "first: told to drain\n" in capsys.readouterr().out
            assert await penstock(redis_url, "workers", "--json") == 0
            rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
            states = {row["name"]: row["state"] for row in rows}
            assert states["second"] == "live"
            assert states.get("first") in ("draining", None)  # it may have left already
            await first.task
            reply = await read_reply(redis, "x")
            assert await penstock(redis_url, "drain", "--all") == 0
            out = capsys.readouterr().out
            assert "second: left after" in out
            assert "first: told" not in out
    assert reply.text() == expected_text("x", "x", 300)
    assert await redis.hmget(keys.state("q", "x"), "handbacks", "crashes") == ["1", None]
    assert not await redis.exists(keys.drain("q", "first"))


async def test_drain_waits_until_the_worker_left(
    redis_url: str, redis: RedisClient, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_worker(redis_url, FakeEngine(step_s=0.005), name="w") as worker:
        await send(redis, prompt="x", id="x", max_tokens=100)
        await read_until(redis, "x", is_chunk)
        assert await penstock(redis_url, "drain", "w", "--timeout", "0.01") == 1
        assert "still draining after 0.01 s: w" in capsys.readouterr().err
        assert await penstock(redis_url, "drain", "w", "w") == 0
        await asyncio.wait_for(worker.task, WAIT_S)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("w:")]
    assert lines[0] == "w: told to drain"
    assert lines[1].startswith("w: left after ")
    assert len(lines) == 2
    assert (await read_reply(redis, "x")).end.finish_reason == "length"
    assert await penstock(redis_url, "drain", "w") == 1
    assert "no live worker 'w'; live: none" in capsys.readouterr().err
    assert await penstock(redis_url, "drain", "--all") == 1
    assert await penstock(redis_url, "drain") == 2


async def test_a_signal_during_a_drain_over_redis_does_not_abort_it(redis_url: str, redis: RedisClient) -> None:
    """Kubernetes sends SIGTERM when the pod of a draining worker is deleted."""
    async with running_worker(redis_url, FakeEngine(step_s=0.005), name="w") as worker:
        await send(redis, prompt="x", id="x", max_tokens=100)
        await read_until(redis, "x", is_chunk)
        await penstock(redis_url, "drain", "w", "--no-wait")
        await eventually(lambda: worker.service.readiness.reasons.get("service") == "draining")
        worker.service.request_drain()
        await worker.task
    assert (await read_reply(redis, "x")).end.completion_tokens == 100


async def test_a_worker_that_dies_while_draining_is_reported(
    redis_url: str, raw: RedisClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with WorkerProcess(redis_url, tmp_path / "log", name="frozen") as process:
        await eventually(lambda: raw.exists(keys.heartbeat("q", "frozen")))
        process.send(signal.SIGSTOP)
        assert await raw.persist(keys.heartbeat("q", "frozen"))  # it lives until it was told, however late that is
        draining = asyncio.create_task(penstock(redis_url, "drain", "frozen"))
        await eventually(lambda: raw.exists(keys.drain("q", "frozen")))
        await raw.delete(keys.heartbeat("q", "frozen"))
        assert await draining == 1
        captured = capsys.readouterr()
        assert "frozen: lost after" in captured.out
        assert "died or froze while draining" in captured.err
    assert await presence(raw, "q", "frozen", b"another process") == "left"

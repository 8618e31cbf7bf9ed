"""Clients can ask whether a queue is served, and are told once when they send to one that is not."""

from __future__ import annotations

import logging

import pytest
from redis import exceptions

from penstock.producer import AsyncClient, Client, QueueStatus, ServerRefused
from penstock.protocol import keys
from penstock.protocol.queue import status as queue_status
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedWorker

pytestmark = pytest.mark.every_server

WARNING = "no worker serves queue 'default'; its requests wait for one"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == queue_status.__name__]


async def test_the_status_of_a_queue(redis_url: str) -> None:
    async with AsyncClient(redis_url) as client:
        assert await client.queue_status() == QueueStatus(is_served=False, num_requests=0)
        handle = await client.submit("a")
        await client.submit("b")
        assert await client.queue_status() == QueueStatus(is_served=False, num_requests=2)
        async with ScriptedWorker(redis_url):
            assert (await client.queue_status()).is_served
            assert (await handle.result()).text == "a"
        assert not (await client.queue_status()).is_served


def test_the_status_for_code_that_blocks(redis_url: str) -> None:
    with Client(redis_url, queue="other") as client:
        assert client.queue_status() == QueueStatus(is_served=False, num_requests=0)


async def test_what_is_no_queue_is_refused(redis_url: str, redis: RedisClient) -> None:
    await redis.set(keys.requests("default"), "junk")
    async with AsyncClient(redis_url) as client:
        with pytest.raises(ServerRefused, match="WRONGTYPE"):
            await client.queue_status()


async def test_a_request_that_nobody_will_take_is_warned_of_once_and_waits(
    redis_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_status, "LOOK_INTERVAL_S", 0.0)
    async with AsyncClient(redis_url) as client:
        handle = await client.submit("a")
        await eventually(lambda: warnings(caplog) == [WARNING])
        for _ in range(5):
            await client.submit("b")
        async with ScriptedWorker(redis_url):
            assert (await handle.result()).text == "a"
            await client.generate("c")
            await client.generate("d")  # by now a look has found the worker
        assert warnings(caplog) == [WARNING]
        await client.submit("e")
        await eventually(lambda: warnings(caplog) == [WARNING] * 2)
    assert all(record.levelno == logging.WARNING for record in caplog.records if record.name == queue_status.__name__)


async def test_a_queue_that_is_served_is_not_warned_of(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client:
        await client.generate("a")
        await client.queue_status()  # answered after the look that went before it
    assert warnings(caplog) == []


async def test_many_requests_ask_once() -> None:
    asked: list[tuple[str, str]] = []

    async def execute(command: str, key: str) -> int:
        asked.append((command, key))
        return 1

    watch = queue_status.ServedWatch(execute, "q")
    for _ in range(1000):
        watch.note_sent()
    await eventually(lambda: asked)
    await watch.close()
    assert asked == [("EXISTS", keys.serving("q"))]


async def test_where_the_client_may_not_look_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async def execute(command: str, key: str) -> int:
        raise exceptions.NoPermissionError("as under a users.acl of an earlier version")

    watch = queue_status.ServedWatch(execute, "q")
    with caplog.at_level(logging.DEBUG, queue_status.__name__):
        watch.note_sent()
        await eventually(lambda: caplog.records)
    assert [(record.levelname, record.name) for record in caplog.records] == [("DEBUG", queue_status.__name__)]

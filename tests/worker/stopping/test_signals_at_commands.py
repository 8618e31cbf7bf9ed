"""Signals at each command that a worker sends to Redis, from start to end: nothing is lost, nothing hangs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from signal import SIGHUP, SIGINT, SIGTERM, Signals
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock import stopping
from penstock.cli.shared import serve
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.protocol.tasks import end_tasks
from penstock.protocol.wire import OwnEntry, ReplyEntry
from penstock.stopping import Stopping
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text, expected_tokens, fake_model
from penstock.worker import service as service_module
from penstock.worker import session
from penstock.worker.config import WorkerConfig
from penstock.worker.errors import Aborted, DrainIncomplete
from penstock.worker.service import WorkerService
from tests.support.patience import WAIT_S, eventually, slow
from tests.support.programs.worker_harness import (
    QUICK,
    add_chunk,
    is_queue_empty,
    read_reply,
    read_until,
    running_worker,
    send,
    take_and_claim,
)
from tests.support.redis_servers.refusing_proxy import PASSING, RefusingProxy
from tests.support.watched import ended

TOKENS = {"resumed": 12, "short": 5, "long": 60}  # by id of a request, which is its prompt
AT_ONCE = 8  # a server has 16 databases


@dataclass
class Life:
    """One worker, from its start to its end.

    Attributes:
        url: URL of the database that it serves, which nobody else uses.
        worker_url: URL of the same database through `proxy`.
        commands: commands that it sent since its start, in this order, each once.
        told_at: commands that it had sent when the first stop came.
    """

    url: str
    worker_url: str
    redis: RedisClient
    proxy: RefusingProxy
    signals: Stopping = field(default_factory=Stopping)
    commands: list[str] = field(default_factory=list)
    told_at: int = -1

    def tell(self, *numbers: Signals) -> None:
        """Delivers signals as the system does, between two instructions of the main thread."""
        for number in numbers:
            self.signals._receive(number, None)
        if self.told_at < 0 and SIGTERM in numbers:
            self.told_at = len(self.commands)

    def note(self, name: str) -> None:
        if name not in self.commands:
            self.commands.append(name)


@asynccontextmanager
async def life(redis_url: str, database: int) -> AsyncIterator[Life]:
    url = f"redis://127.0.0.1:{urlsplit(redis_url).port}/{database}"
    redis = connect(url, decode=True)
    await redis.flushdb()
    async with RefusingProxy(redis_url) as proxy:
        try:
            yield Life(url, f"redis://127.0.0.1:{proxy.port}/{database}", redis, proxy)
        finally:
            await redis.aclose()


async def live(life: Life, hear: Callable[[str], None], **more: Any) -> asyncio.Task[None]:
    """Has a worker begin, resume and end requests, and drain in their middle. Returns how it ended.

    Args:
        life: life that it is part of.
        hear: called with each command.
        more: settings of the worker.
    """

    def hear_all(name: str) -> None:
        life.note(name)
        hear(name)

    life.proxy.on_command = hear_all
    await send(life.redis, id="resumed", prompt="resumed", max_tokens=TOKENS["resumed"])
    await take_and_claim(life.redis, "dead", "resumed")
    await add_chunk(life.redis, "resumed", 1, 0, expected_tokens(b"resumed", "resumed", 0, 4))
    for request_id in ("short", "long"):
        await send(life.redis, id=request_id, prompt=request_id, max_tokens=TOKENS[request_id])
    options = {**QUICK, "name": "first", "drain_timeout_s": 0.1, **more}
    engine = FakeEngine()
    engine.hold()
    service = WorkerService(WorkerConfig(**options), life.worker_url, lambda _: fake_model(engine))
    worker = asyncio.create_task(serve._run(service, life.signals), name="worker")
    begun = asyncio.create_task(read_until(life.redis, "long", lambda entry: entry.type == "chunk"))
    while not (worker.done() or begun.done()):
        engine.allow(1)
        await asyncio.sleep(0.01)
    taken_over = asyncio.create_task(read_until(life.redis, "resumed", _is_by_first))
    await asyncio.wait({worker, taken_over}, return_when=asyncio.FIRST_COMPLETED)
    await end_tasks([begun, taken_over])
    life.tell(SIGTERM)
    engine.allow(20)  # the short ones may end in the drain, the long one is handed back
    await ended(worker)
    return worker


def _is_by_first(entry: ReplyEntry) -> bool:
    return isinstance(entry, OwnEntry) and entry.worker == "first"


async def ends_whole(life: Life) -> None:
    """Checks that another worker finds all that this one has left."""
    async with running_worker(life.url, name="heir", heartbeat_ttl_s=1000.0):
        for request_id, count in TOKENS.items():
            reply = await read_reply(life.redis, request_id)
            assert reply.tokens() == expected_tokens(request_id.encode(), request_id, 0, count)
            assert reply.text() == expected_text(request_id, request_id, count)
            assert reply.end.finish_reason == "length"
        await eventually(lambda: is_queue_empty(life.redis))


async def every_command(redis_url: str) -> tuple[list[str], list[str]]:
    """Returns the commands that a worker sends in its life, and those of them that it sends after the first stop."""
    after: list[str] = []
    async with life(redis_url, 0) as one:
        worker = await live(one, lambda name: after.append(name) if one.told_at >= 0 else None)
        worker.result()
        await ends_whole(one)
    return one.commands, list(dict.fromkeys(after))


async def at_each(names: list[str], at: Callable[[str, int], Awaitable[None]]) -> None:
    """Lives through all moments, several at a time, each on a database of its own."""
    free: asyncio.Queue[int] = asyncio.Queue()
    for database in range(AT_ONCE):
        free.put_nowait(database)

    async def one(name: str) -> None:
        database = await free.get()
        try:
            await at(name, database)
        except BaseException as error:
            error.add_note(f"signals at {name}")
            raise
        finally:
            free.put_nowait(database)

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(one(name))


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no busy machine be a reason to leave without a word."""
    for module, name in (
        (session, "HAND_BACK_TIMEOUT_S"),
        (session, "GOODBYE_TIMEOUT_S"),
        (service_module, "RELEASE_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, name, WAIT_S)


async def test_a_stop_that_comes_often_at_any_command_drains(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop comes first at one command, and again with hang-ups at each command from there to the end."""
    monkeypatch.setattr(stopping, "SAME_STOP_S", math.inf)
    patient(monkeypatch)
    names, _ = await every_command(redis_url)
    assert {"presence.RESERVE", "presence.BEAT", "claims.CLAIM", "XRANGE"} <= set(names), names

    async def at(name: str, database: int) -> None:
        async with life(redis_url, database) as one:

            def hear(heard: str) -> None:
                if heard == name or one.told_at >= 0:
                    one.tell(SIGHUP, SIGTERM, SIGINT, SIGTERM, SIGHUP)

            (await live(one, hear, heartbeat_ttl_s=1000.0)).result()
            assert not await one.redis.exists(keys.heartbeat("q", "first"))
            await ends_whole(one)

    await at_each(names, at)


async def test_a_later_stop_at_any_command_of_a_drain_aborts(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    _, names = await every_command(redis_url)
    assert {"claims.RETURN", "lanes.PUT_BACK", "presence.LEAVE"} <= set(names), names
    monkeypatch.setattr(stopping, "SAME_STOP_S", 0.0)
    aborted: list[str] = []

    async def at(name: str, database: int) -> None:
        async with life(redis_url, database) as one:

            def hear(heard: str) -> None:
                if heard == name and one.told_at >= 0 and name not in aborted:
                    aborted.append(name)
                    one.tell(SIGHUP, SIGINT)

            worker = await live(one, hear)
            if name in aborted:
                assert isinstance(worker.exception(), Aborted)
            else:
                worker.result()
            await ends_whole(one)

    await at_each(names, at)
    assert {"claims.RETURN", "presence.LEAVE"} <= set(aborted)


@pytest.mark.parametrize(
    ("refusal", "same_stop_s", "end"),
    [
        ("no answer", math.inf, DrainIncomplete),
        ("READONLY", 0.0, Aborted),
        slow("READONLY", math.inf, DrainIncomplete),
        slow("no answer", 0.0, Aborted),
    ],
)
async def test_signals_while_redis_refuses_the_drain(
    redis: RedisClient,
    redis_url: str,
    refusal: str,
    same_stop_s: float,
    end: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopping, "SAME_STOP_S", same_stop_s)
    for name in ("HAND_BACK_TIMEOUT_S", "GOODBYE_TIMEOUT_S"):
        monkeypatch.setattr(session, name, 0.2)
    async with life(redis_url, 0) as one:

        def hear(name: str) -> None:
            if one.told_at < 0:
                return
            one.proxy.on_command = str
            if refusal == "no answer":
                one.proxy.is_answering.clear()
            else:
                one.proxy.refuse(PASSING[refusal])
            one.tell(SIGHUP, SIGINT, SIGTERM)

        worker = await live(one, hear)
        assert isinstance(worker.exception(), end)
        one.proxy.allow()
        one.proxy.is_answering.set()
        await ends_whole(one)

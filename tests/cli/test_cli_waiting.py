"""Output of commands while their requests wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs

from penstock.cli.shared import waiting
from penstock.cli.shared.waiting import shown_wait, wait_until_served
from penstock.producer import AsyncClient, ConnectionLost
from penstock.protocol.wire import ChunkEntry
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker


async def test_a_queue_that_is_served_is_not_waited_for(redis_url: str) -> None:
    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client:
        with capture_logs() as lines:
            await wait_until_served(client, "default")
    assert lines == []


async def test_a_queue_that_nobody_serves_is_waited_for(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_INTERVAL_S", 0.01)
    async with AsyncClient(redis_url) as client:
        with capture_logs() as lines:
            wait = asyncio.create_task(wait_until_served(client, "default"))
            await eventually(lambda: lines)
            assert not wait.done()
            async with ScriptedWorker(redis_url):
                await asyncio.wait_for(wait, WAIT_S)
    assert [line["event"] for line in lines] == ["no worker serves queue 'default'; waiting for one"]


async def test_a_server_that_is_not_there_is_not_waited_for() -> None:
    async with AsyncClient("redis://127.0.0.1:1") as client:
        with pytest.raises(ConnectionLost):
            await wait_until_served(client, "default")


async def test_where_there_is_no_terminal_nobody_asks(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.0)
    before = asyncio.all_tasks()
    async with AsyncClient(redis_url) as client, shown_wait(client, "default", client.stream("x")) as end_wait:
        assert asyncio.all_tasks() == before
        await end_wait()


async def test_how_far_a_long_prompt_is_is_shown(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    @contextmanager
    def recorded(title: str) -> Iterator[Callable[[str], None]]:
        yield said.append

    async def slowly(reply: ScriptedReply) -> None:
        await reply.own()
        await eventually(lambda: said)  # the queue: there is no more to tell
        await reply.write(ChunkEntry(index=0, offset=0, text="", tokens=(), prefill_done=2048, prefill_total=6800))
        await eventually(lambda: said[-1].startswith("reading"))
        await reply.chunk("a")
        await reply.end()

    monkeypatch.setattr(waiting, "PATIENCE_S", 0.0)
    monkeypatch.setattr(waiting, "spinner", recorded)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    async with ScriptedWorker(redis_url, slowly), AsyncClient(redis_url) as client:
        reply = client.stream("x")
        async with shown_wait(client, "default", reply):
            assert (await reply.read_to_end()).text == "a"
    assert said[0].startswith("waiting for the first token")
    assert said[-1] == "reading the prompt: 2,048 of 6,800 tokens"

"""After a signal at any moment of a gateway's drain, a stream ends whole there or goes on elsewhere."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, Signals
from typing import Any

import httpx2 as httpx
import pytest
from structlog.testing import capture_logs
from uvicorn.lifespan.on import LifespanOn

from penstock import stopping
from penstock.gateway.abandonment.readers import AbandonmentWatch
from penstock.gateway.batches.runner import BatchRunner
from penstock.gateway.http.interruptions import Interruptions
from penstock.gateway.processes import ABORT, ABORTED, _Processes
from penstock.gateway.serve import REFUSED, _Process
from penstock.gateway.server import GatewayServer
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.store.connection import Store
from penstock.protocol.redis.connection import RedisClient
from penstock.serving import garbage
from penstock.stopping import Stopping
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import Held, ScriptedWorker
from tests.support.programs.gateway_harness import Listening, announce, running_gateway
from tests.support.watched import ended

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "x"}], "stream": True}


@pytest.fixture
async def worker(redis: RedisClient, redis_url: str) -> AsyncIterator[ScriptedWorker]:
    await announce(redis)
    async with ScriptedWorker(redis_url, Held()) as worker:
        yield worker


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> list[GatewayServer]:
    """Servers of the processes that the test runs, which leave this process's garbage alone."""
    made: list[GatewayServer] = []
    monkeypatch.setattr(garbage, "settle", lambda: None)
    monkeypatch.setattr("penstock.gateway.server.END_S", WAIT_S)

    def make(*given: Any) -> GatewayServer:
        made.append(GatewayServer(*given))
        return made[-1]

    monkeypatch.setattr("penstock.gateway.serve.GatewayServer", make)
    return made


@dataclass(frozen=True, slots=True)
class Serving(Listening):
    """A gateway process as far as it can run within the test's own process."""

    signals: Stopping
    status: asyncio.Task[int]

    def tell(self, *numbers: Signals) -> None:
        """Delivers signals as the system does, between two instructions of the main thread."""
        for number in numbers:
            self.signals._receive(number, None)


@asynccontextmanager
async def serving(redis_url: str, *, drain_timeout_s: float, lifeline: int | None = None) -> AsyncIterator[Serving]:
    """Runs a gateway until the block ends it."""
    settings = GatewaySettings(redis_url=redis_url, drain_timeout_s=drain_timeout_s, redis_timeout_s=WAIT_S)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        signals = Stopping()
        status = asyncio.create_task(_Process(settings, listener, (), 64)._serve(0, signals, lifeline))
        try:
            yield Serving(listener.getsockname()[1], signals, status)
        finally:
            await ended(status)


@dataclass(slots=True)
class Stream:
    """An answer as far as a client has it."""

    text: str = ""
    last_id: str = ""
    codes: list[str] = field(default_factory=list)

    async def read(self, lines: AsyncIterator[str]) -> None:
        """Reads to the end of the answer, or to that of the connection."""
        with suppress(httpx.TransportError):
            async for line in lines:
                self.take(line)

    def take(self, line: str) -> None:
        name, _, value = line.partition(": ")
        if name == "id":
            self.last_id = value
        elif name == "data" and value != "[DONE]":
            event = json.loads(value)
            self.text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))
            self.codes += [event["error"]["code"]] if "error" in event else []


@asynccontextmanager
async def asking(url: str, key: str, stream: Stream) -> AsyncIterator[AsyncIterator[str]]:
    """Yields the lines of an answer, after those that `stream` has."""
    headers = {"idempotency-key": key} | ({"last-event-id": stream.last_id} if stream.last_id else {})
    async with (
        httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client,
        client.stream("POST", CHAT, json=BODY, headers=headers) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        yield answer.aiter_lines()


async def drained(redis_url: str, key: str, told: asyncio.Future[Serving]) -> tuple[Stream, int]:
    """Stops a gateway in the middle of an answer; returns what its client got, and its exit status.

    Args:
        redis_url: URL of the server.
        key: Idempotency-Key of the request.
        told: gets the gateway before it is told.
    """
    stream = Stream()
    async with (
        serving(redis_url, drain_timeout_s=0.1) as gateway,
        asking(gateway.url, key, stream) as lines,
    ):
        while not stream.text:
            stream.take(await anext(lines))
        told.set_result(gateway)
        gateway.tell(SIGTERM)
        await stream.read(lines)
        return stream, await gateway.status


async def goes_on(redis_url: str, streams: dict[str, Stream]) -> None:
    """Continues the streams at another gateway, by key."""
    async with running_gateway(redis_url) as gateway:
        for key, stream in streams.items():
            async with asking(gateway.url, key, stream) as lines:
                await stream.read(lines)
    assert {key: stream.text for key, stream in streams.items()} == dict.fromkeys(streams, "sparrows sleep")


MOMENTS: dict[str, tuple[type, str]] = {
    "it begins to drain": (GatewayServer, "drain"),
    "it listens no more": (GatewayServer, "shutdown"),
    "streams are told": (Interruptions, "end_all"),
    "answers have ended": (LifespanOn, "shutdown"),
    "batches stop": (BatchRunner, "__aexit__"),
    "what is open is handed over": (AbandonmentWatch, "__aexit__"),
    "connections close": (Store, "__aexit__"),
}
"""Moments of a drain, by the method that is called then."""


@pytest.mark.parametrize(("same_stop_s", "end"), [(math.inf, 0), (0.0, ABORTED)])
async def test_signals_at_each_moment_of_a_drain(
    worker: ScriptedWorker, redis_url: str, same_stop_s: float, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "SAME_STOP_S", same_stop_s)
    streams = {}
    for moment, (kind, name) in MOMENTS.items():
        told: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()
        method, num_calls = getattr(kind, name), 0

        def signalled(*given: Any, **named: Any) -> Any:
            nonlocal num_calls
            num_calls += told.done()  # noqa: B023
            if told.done() and num_calls == 1:  # noqa: B023
                told.result().tell(SIGHUP, SIGINT, SIGTERM, SIGHUP)  # noqa: B023
            return method(*given, **named)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(kind, name, signalled)
            streams[moment], status = await drained(redis_url, moment, told)
        assert (status, bool(num_calls)) == (end, True), moment
        assert streams[moment].codes == ["gateway_stopping"] or end == ABORTED, moment
    worker.behave.may_end.set()  # type: ignore[attr-defined]
    await goes_on(redis_url, streams)
    assert len(worker.taken) == len(streams)


async def test_who_drains_already_is_told_for_the_first_time(
    worker: ScriptedWorker, redis_url: str, servers: list[GatewayServer]
) -> None:
    """Redis has refused for too long, and then whoever runs the gateway stops it."""
    stream = Stream()
    async with (
        serving(redis_url, drain_timeout_s=WAIT_S) as gateway,
        asking(gateway.url, "k", stream) as lines,
    ):
        servers[0].app.state.gateway.standing.must_drain.set()
        await eventually(lambda: servers[0].should_exit)
        gateway.tell(SIGTERM)
        worker.behave.may_end.set()  # type: ignore[attr-defined]
        await stream.read(lines)
        assert (stream.text, await gateway.status) == ("sparrows sleep", REFUSED)


async def test_one_of_several_is_aborted_by_the_first_process_alone(
    worker: ScriptedWorker, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop comes to it from a terminal's group and from the first process, which may be late or be killed."""
    monkeypatch.setattr(stopping, "SAME_STOP_S", 0.0)
    lose_parent, is_lost = _Process._lose_parent, asyncio.Event()

    def lose(*given: Any) -> None:
        is_lost.set()
        lose_parent(*given)

    monkeypatch.setattr(_Process, "_lose_parent", lose)
    stream = Stream()
    lifeline, held = os.pipe()
    try:
        async with (
            serving(redis_url, drain_timeout_s=WAIT_S, lifeline=lifeline) as gateway,
            asking(gateway.url, "k", stream) as lines,
        ):
            gateway.tell(SIGTERM, SIGTERM)
            os.close(held)
            await asyncio.wait_for(is_lost.wait(), WAIT_S)
            gateway.tell(SIGTERM)
            worker.behave.may_end.set()  # type: ignore[attr-defined]
            await stream.read(lines)
            assert (stream.text, await gateway.status) == ("sparrows sleep", 0)
    finally:
        os.close(lifeline)


@pytest.mark.parametrize(
    ("ends", "status"), [([0, -SIGKILL], 128 + SIGKILL), ([-ABORT, 0], ABORTED), ([-ABORT, ABORTED], ABORTED)]
)
def test_a_process_that_is_killed_while_all_drain_is_said(ends: list[int], status: int) -> None:
    processes = _Processes(lambda *_: 0, Stopping(), lambda _: False)
    processes._is_stopping = True
    processes._places = {pid: pid for pid in range(len(ends))}
    with capture_logs() as log:
        for pid, end in enumerate(ends):
            processes._ended(pid, end)
    assert processes._status == status
    assert [line["exit_status"] for line in log] == [end for end in ends if end < 0]

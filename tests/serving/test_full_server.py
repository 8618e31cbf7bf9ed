"""A server that is full, for whatever reason, answers probes and tells new clients why it refuses them."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from penstock.serving.http import places
from penstock.serving.http.guard import ACCEPTS_AT_ONCE, NUM_ON_TOP, GuardedServer, PortLimits
from tests.serving.guarded_server import guarded, limits
from tests.support.patience import WAIT_S, eventually

MAX = 3
NUM_KEPT = NUM_LEAVING = 4
MANY = 30  # more than all of them together
PROBE = b"/probe"
NO_LINGER = struct.pack("ii", 1, 0)  # closing resets


@pytest.fixture(autouse=True)
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "NUM_KEPT", NUM_KEPT)
    monkeypatch.setattr(places, "NUM_LEAVING", NUM_LEAVING)


def asking(path: bytes, *headers: bytes, first: bytes = b"GET", version: bytes = b"1.1") -> bytes:
    return b"\r\n".join((b"%s %s HTTP/%s" % (first, path, version), b"Host: x", *headers, b"", b""))


HELD = asking(b"/held")
SLOW_BODY = asking(b"/held", b"Content-Length: 100", first=b"POST") + b"{"
FILLS = {
    "streams": HELD,
    "silence": b"",
    "slow heads": HELD[:-1],
    "slow bodies": SLOW_BODY,
    "slow chunks": asking(b"/held", b"Transfer-Encoding: chunked", first=b"POST") + b"1\r\n{\r\n",
    "idle": asking(b"/"),
    "idle after a probe": asking(PROBE),
    "a stream behind a probe": asking(PROBE) + HELD,
    "a probe with a body": asking(PROBE, b"Content-Length: 100") + b"{",
    "probes that hang": asking(b"/probe/hanging"),
}
ARE_ANSWERED = {"streams", "a stream behind a probe"}  # and nobody takes their places


class App:
    """Answers at once, except for the paths that are held."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_begun = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_begun += 1
        await send_head(send) if scope["path"] == "/begun" else None
        if scope["path"] in ("/held", "/begun", "/probe/hanging"):
            await self.may_answer.wait()
        if scope["path"] != "/begun":
            await send_head(send)
        await send({"type": "http.response.body", "body": b"ok"})


async def send_head(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.received = b""
        self.ended = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.received += data

    @property
    def status(self) -> bytes:
        return self.received.partition(b" ")[2][:3]

    async def close(self) -> None:
        self.writer.transport.abort()
        await asyncio.wait({self.ended})


class Served:
    def __init__(self, app: App, server: GuardedServer, port: int) -> None:
        self.app = app
        self.server = server
        self.port = port
        self.clients: list[Client] = []

    async def send(self, data: bytes) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        client.writer.write(data)
        return client

    async def ask(self, path: bytes) -> Client:
        """Asks, and waits for the whole answer."""
        client = await self.send(asking(path, b"Connection: close"))
        await asyncio.wait_for(client.ended, WAIT_S)
        return client


@asynccontextmanager
async def serving(bounds: PortLimits) -> AsyncIterator[Served]:
    app = App()
    async with guarded(app, bounds) as (server, port):
        served = Served(app, server, port)
        try:
            yield served
        finally:
            app.may_answer.set()
            for client in served.clients:
                await client.close()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(limits(MAX, probes=frozenset({"/probe", "/probe/hanging"}))) as served:
        yield served


@pytest.mark.parametrize("fill", FILLS)
async def test_whatever_fills_it_probes_are_answered(served: Served, fill: str) -> None:
    fillers = [await served.send(FILLS[fill]) for _ in range(MANY)]
    at = served.server.config.places
    await eventually(lambda: at.num_turned_away >= MANY - MAX - NUM_KEPT)
    for _ in range(3):
        assert (await served.ask(PROBE)).status == b"200"
        newcomer = await served.ask(b"/")
        assert newcomer.status == (b"503" if fill in ARE_ANSWERED else b"200"), newcomer.received
    assert len(at.reading) + len(at.answering) <= MAX
    assert len(served.server.server_state.connections) <= MAX + NUM_KEPT + NUM_LEAVING + ACCEPTS_AT_ONCE
    for filler in fillers:
        if filler.ended.done():  # nobody was cut without a word
            assert b"\r\nconnection: close\r\n" in filler.received
            assert fill == "a stream behind a probe" or b"\r\nretry-after: 1\r\n" in filler.received


async def test_who_is_answered_stays_to_the_end_of_it(served: Served) -> None:
    held = [await served.send(asking(b"/begun", b"Connection: close")) for _ in range(MAX)]
    await eventually(lambda: all(client.received for client in held))
    for _ in range(MANY):
        await served.send(b"")
    assert (await served.ask(b"/")).status == b"503"
    served.app.may_answer.set()
    for client in held:
        await asyncio.wait_for(client.ended, WAIT_S)
        assert client.received.endswith(b"ok")
    await eventually(lambda: not served.server.config.places.answering)
    assert (await served.ask(b"/")).status == b"200"


async def test_a_refusal_reads_like_one_of_the_application(served: Served) -> None:
    for _ in range(MAX):
        await served.send(HELD)
    await eventually(lambda: served.app.num_begun == MAX)
    refused = (await served.ask(b"/")).received
    head, _, body = refused.partition(b"\r\n\r\n")
    assert {b"retry-after: 1", b"x-should-retry: true", b"connection: close"} <= set(head.split(b"\r\n"))
    assert b'"code": "unavailable"' in body
    assert b'"type": "server_error"' in body


async def test_a_body_that_is_refused_at_its_head_is_not_waited_for(served: Served) -> None:
    for _ in range(MAX):
        await served.send(HELD)
    await eventually(lambda: served.app.num_begun == MAX)
    client = await served.send(asking(b"/", b"Content-Length: 1000", b"Expect: 100-continue", first=b"POST"))
    await asyncio.wait_for(client.ended, WAIT_S)
    assert client.status == b"503"
    assert served.app.num_begun == MAX


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("fill", ["silence", "slow bodies", "slow chunks"])
async def test_turning_away_whoever_has_just_left_harms_nobody(served: Served, fill: str, is_reset: bool) -> None:
    """The new client for whom that happens is served.

    The server has not yet heard that the other one left. It learns that as it writes, and a kernel that says so resets
    the connection before `write` returns.
    """
    at = served.server.config.places
    where = at.waiting if fill == "silence" else at.reading
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(FILLS[fill])
        await eventually(lambda: where)
        if is_reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    next(iter(where)).turn_away()
    assert not where
    await eventually(lambda: not (at.leaving or served.server.server_state.connections))


async def test_no_other_method_and_no_other_path_is_a_probe(served: Served) -> None:
    for _ in range(MAX):
        await served.send(HELD)
    await eventually(lambda: served.app.num_begun == MAX)
    for data in (asking(PROBE, first=b"POST"), asking(b"/probes"), asking(b"/probe/"), asking(b"//probe")):
        client = await served.send(data)
        await asyncio.wait_for(client.ended, WAIT_S)
        assert client.status == b"503", data
    for data in (asking(PROBE + b"?verbose", b"Connection: close"), asking(PROBE, version=b"1.0")):
        client = await served.send(data)
        await asyncio.wait_for(client.ended, WAIT_S)
        assert client.status == b"200", data


def test_accepts_of_one_moment_are_far_fewer_than_the_places_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise new connections could turn a probe away before its request is looked at."""
    monkeypatch.undo()
    assert places.NUM_KEPT >= 4 * ACCEPTS_AT_ONCE
    assert NUM_ON_TOP == places.NUM_KEPT + places.NUM_LEAVING + ACCEPTS_AT_ONCE

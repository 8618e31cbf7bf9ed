"""Answers to HTTP/1.0 clients have no chunks, and an end that can be told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.serving.http.guard import GuardedServer
from tests.serving.guarded_server import guarded, limits
from tests.support.patience import WAIT_S

PARTS = [b"one ", b"two ", b"three"]


class App:
    """Answers by path; what it sends after the first part waits for `may_go_on`."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        length = [(b"Content-Length", b"%d" % len(b"".join(PARTS)))] if path == "/length" else []
        status = 204 if path == "/nothing" else 200
        await send({"type": "http.response.start", "status": status, "headers": length})
        if path == "/nothing":
            await send({"type": "http.response.body"})
            return
        for number, part in enumerate(PARTS):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await self.may_go_on.wait()
            if path == "/broken" and number == 1:
                raise RuntimeError("broken off")
            if path == "/left" and number == 1:
                return
        await send({"type": "http.response.body"})


class Served:
    def __init__(self, app: App, server: GuardedServer, port: int) -> None:
        self.app = app
        self.server = server
        self.port = port
        self.writers: list[asyncio.StreamWriter] = []

    async def ask(self, path: bytes, *, method: bytes = b"GET", version: bytes = b"1.0") -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        headers = b"Host: x\r\nConnection: close\r\nExpect: 100-continue\r\n\r\n"
        writer.write(b"%s %s HTTP/%s\r\n" % (method, path, version) + headers)
        return reader


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    app = App()
    async with guarded(app, limits(), log_level="critical") as (server, port):
        served = Served(app, server, port)
        try:
            yield served
        finally:
            app.may_go_on.set()
            for writer in served.writers:
                writer.transport.abort()
            server.force_exit = True


async def head_of(reader: asyncio.StreamReader) -> bytes:
    return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)).lower()


@pytest.mark.parametrize("path", [b"/", b"/length"])
async def test_a_body_ends_with_the_connection_and_comes_part_by_part(served: Served, path: bytes) -> None:
    reader = await served.ask(path)
    head = await head_of(reader)
    assert head.startswith(b"http/1.1 200 ok\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close\r\n" in head
    assert (b"content-length" in head) == (path == b"/length")
    assert await asyncio.wait_for(reader.readexactly(len(PARTS[0])), WAIT_S) == PARTS[0]
    served.app.may_go_on.set()
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b"".join(PARTS[1:])


async def test_http_1_1_still_gets_chunks(served: Served) -> None:
    served.app.may_go_on.set()
    reader = await served.ask(b"/", version=b"1.1")
    assert b"transfer-encoding: chunked" in await head_of(reader)
    assert (await asyncio.wait_for(reader.read(), WAIT_S)).endswith(b"5\r\nthree\r\n0\r\n\r\n")


@pytest.mark.parametrize(("method", "path"), [(b"HEAD", b"/"), (b"GET", b"/nothing")])
async def test_what_has_no_body_has_none(served: Served, method: bytes, path: bytes) -> None:
    served.app.may_go_on.set()
    reader = await served.ask(path, method=method)
    assert b"transfer-encoding" not in await head_of(reader)
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b""


@pytest.mark.parametrize("path", [b"/broken", b"/left"])
async def test_a_body_that_is_broken_off_does_not_look_whole(served: Served, path: bytes) -> None:
    reader = await served.ask(path)
    await head_of(reader)
    served.app.may_go_on.set()
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), WAIT_S)


async def test_nor_does_one_whose_connection_is_cut(served: Served) -> None:
    reader = await served.ask(b"/")
    await head_of(reader)
    await asyncio.wait_for(reader.readexactly(len(PARTS[0])), WAIT_S)
    [connection] = served.server.server_state.connections
    connection.cut()  # type: ignore[union-attr]  # as at the end of a drain
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), WAIT_S)

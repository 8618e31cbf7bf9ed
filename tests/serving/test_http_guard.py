"""Bounds on one client of an HTTP server: a number of connections, none for long without a request."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.serving.http.guard import PortLimits
from tests.serving.guarded_server import guarded, limits
from tests.support.patience import WAIT_S, eventually

SOON_S = 0.05

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class App:
    """Answers with `body` once it may."""

    body: bytes = b"ok"
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    num_begun: int = 0
    num_ended: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_begun += 1
        await self.may_answer.wait()
        headers = [(b"content-length", str(2 * len(self.body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await send({"type": "http.response.body", "body": self.body})
        self.num_ended += 1


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def transport(self) -> asyncio.Transport:
        assert isinstance(self.writer.transport, asyncio.Transport)
        return self.writer.transport

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"okok"), WAIT_S)

    async def was_cut(self) -> bool:
        """Waits until the server ends the connection; returns whether it did so without an answer."""
        try:
            return await asyncio.wait_for(self.reader.read(), WAIT_S) == b""
        except ConnectionResetError:
            return True


Connect = Callable[[], Awaitable[Client]]


@asynccontextmanager
async def serving(app: App, limits: PortLimits) -> AsyncIterator[Connect]:
    clients: list[Client] = []
    async with guarded(app, limits) as (_, port):

        async def connect() -> Client:
            clients.append(Client(*await asyncio.open_connection("127.0.0.1", port)))
            return clients[-1]

        try:
            yield connect
        finally:
            app.may_answer.set()
            for client in clients:
                client.transport.abort()


def at_once() -> App:
    app = App()
    app.may_answer.set()
    return app


@pytest.mark.parametrize("sent", [b"", b"GET / HTT", b"GET / HTTP/1.1\r\n", REQUEST[:-1]])
async def test_headers_that_never_come_end_the_connection(sent: bytes) -> None:
    app = at_once()
    async with serving(app, limits(8, header_timeout_s=SOON_S)) as connect:
        client = await connect()
        client.send(sent)
        assert await client.was_cut()
    assert app.num_begun == 0


async def test_dripping_headers_do_not_put_the_end_off() -> None:
    async with serving(at_once(), limits(8, header_timeout_s=SOON_S)) as connect:
        client = await connect()
        client.send(b"GET / HTTP/1.1\r\n")
        cut = asyncio.create_task(client.was_cut())
        while not cut.done():
            client.send(b"a: b\r\n")
            await asyncio.sleep(SOON_S / 10)
        assert await cut


@pytest.mark.parametrize("sent", [b"", REQUEST[:-1]])
async def test_later_headers_that_never_come_do_too(sent: bytes) -> None:
    async with serving(at_once(), limits(8, header_timeout_s=SOON_S, idle_timeout_s=0.1)) as connect:
        client = await connect()
        client.send(REQUEST + REQUEST)
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
        client.send(sent)
        assert await client.was_cut()


async def test_a_body_that_never_ends_ends_with_its_answer() -> None:
    async with serving(at_once(), limits(8, body_timeout_s=0.1)) as connect:
        client = await connect()
        client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        await client.answer()
        cut = asyncio.create_task(client.was_cut())
        while not cut.done():
            client.send(b"x")
            await asyncio.sleep(SOON_S / 10)
        assert await cut


async def test_a_request_that_came_whole_is_answered_however_long_it_takes() -> None:
    app = App()
    async with serving(app, limits(8, header_timeout_s=SOON_S)) as connect:
        client = await connect()
        client.send(REQUEST)
        await eventually(lambda: app.num_begun)
        assert await (await connect()).was_cut()  # it came later, so the time of the first is over as well
        app.may_answer.set()
        assert (await client.answer()).endswith(b"okok")


async def test_who_leaves_makes_room() -> None:
    async with serving(at_once(), limits(2)) as connect:
        first = await connect()
        for _ in range(10):
            other = await connect()
            other.send(REQUEST.replace(b"Host: x", b"Host: x\r\nConnection: close"))
            await other.answer()
            await other.was_cut()
        first.send(REQUEST)
        await first.answer()


async def test_an_answer_that_nobody_takes_is_given_up() -> None:
    app = at_once()
    app.body = b"x" * (1 << 24)  # more than the buffers of both sides
    async with serving(app, limits(8, answer_timeout_s=SOON_S)) as connect:
        client = await connect()
        client.transport.pause_reading()
        client.send(REQUEST)
        await eventually(lambda: app.num_ended == 1)
        client.transport.resume_reading()
        assert not (await client.reader.read()).endswith(b"okok")
    assert app.num_ended == 1


async def test_a_client_that_takes_nothing_is_given_up() -> None:
    app = at_once()
    app.body = b"x" * (1 << 24)  # more than the buffers of both sides
    async with serving(app, limits(stall_timeout_s=SOON_S)) as connect:
        client = await connect()
        client.transport.pause_reading()
        client.send(REQUEST)
        await eventually(lambda: app.num_ended == 1)
        client.transport.resume_reading()
        assert not (await client.reader.read()).endswith(b"okok")


async def test_a_client_that_takes_little_at_a_time_gets_all() -> None:
    app = at_once()
    app.body = b"x" * (1 << 22)
    async with serving(app, limits(stall_timeout_s=1.0)) as connect:
        client = await connect()
        client.send(REQUEST.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        num_taken, begun_s = 0, time.monotonic()
        while part := await client.reader.read(1 << 16):
            num_taken += len(part)
            await asyncio.sleep(0.015)
        assert num_taken > 2 * len(app.body)
        assert time.monotonic() - begun_s > 1.0  # so there was a look at it, or several


async def test_no_packet_of_an_answer_waits_for_an_acknowledgement() -> None:
    """Nagle's algorithm would hold the second packet back, and the client's kernel its acknowledgement for 40 ms."""
    async with guarded(App(), limits()) as (server, port):
        await eventually(lambda: server.started)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await eventually(lambda: server.server_state.connections)
        [connection] = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()

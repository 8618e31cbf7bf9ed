"""Base of the tests' proxies, which listen and forward each connection to a server."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from itertools import cycle
from types import TracebackType
from typing import Any, Self


class Forwarding:
    """Listens on a free port of 127.0.0.1 within `async with`.

    Args:
        host: the server's host.
        server_port: the server's port.
        tls: TLS context for clients; None: no TLS.

    Attributes:
        port: port where it listens.
        num_links: number of connections accepted, without those that TLS refused.
    """

    def __init__(self, host: str, server_port: int, tls: ssl.SSLContext | None = None) -> None:
        self._host, self._server_port, self._tls = host, server_port, tls
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._reset: set[asyncio.Task[None]] = set()
        self.num_links = 0
        self.port = 0

    def cut(self) -> None:
        """Closes all connections there are."""
        for link in list(self._links):
            link.cancel()

    def reset(self) -> None:
        """Closes all connections there are with an RST: what is on its way is lost, either way."""
        self._reset |= self._links
        self.cut()

    def lead_to(self, server_port: int) -> None:
        """Has new connections reach another port."""
        self._server_port = server_port

    async def listen(self) -> None:
        """Begins to listen, on the same port as before if there was one. Existing connections stay."""
        if self._server is not None:
            self._server.close()
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_links += 1
        link = asyncio.create_task(self._serve(reader, writer))
        self._links.add(link)
        link.add_done_callback(self._links.discard)
        link.add_done_callback(self._reset.discard)
        link.add_done_callback(lambda _: writer.transport.abort())  # one that is cancelled before it began does nothing
        await asyncio.wait({link})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server: asyncio.StreamWriter | None = None
        try:
            server_reader, server = await asyncio.open_connection(self._host, self._server_port)
            await self._forward(reader, writer, server_reader, server)
        except OSError:
            pass
        finally:
            for end in (writer, server):
                if end is not None:
                    if asyncio.current_task() in self._reset:
                        _linger_not(end)
                    end.transport.abort()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server: asyncio.StreamWriter,
    ) -> None:
        """Serves one connection until it is to be closed."""
        await until_one_ends(self._pass(reader, server), self._pass(server_reader, writer, to_client=True))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, to_client: bool = False
    ) -> None:
        """Passes one direction of a connection on, to its end."""
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


def _linger_not(end: asyncio.StreamWriter) -> None:
    connected = end.get_extra_info("socket")  # None: TLS has ended already
    if connected is not None:
        with suppress(OSError):  # the other end was sooner
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def until_one_ends(*ways: Coroutine[Any, Any, None]) -> None:
    """Runs both directions of a connection until the first ends, so that the server notices who has gone."""
    tasks = [asyncio.create_task(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Trickling(Forwarding):
    """Passes data on in pieces, each a packet of its own.

    Args:
        host: the server's host.
        server_port: the server's port.
        sizes: sizes of the pieces in bytes, in turn.
        pause_s: pause after each piece that goes to a client.
    """

    def __init__(self, host: str, server_port: int, sizes: Sequence[int], pause_s: float = 0.0) -> None:
        super().__init__(host, server_port)
        self._sizes, self._pause_s = sizes, pause_s

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, to_client: bool = False
    ) -> None:
        size, pause_s = cycle(self._sizes), self._pause_s if to_client else 0.0
        while data := await reader.read(1 << 16):
            while data:
                count = next(size)
                writer.write(data[:count])
                await writer.drain()
                await asyncio.sleep(pause_s)
                data = data[count:]

"""A TCP proxy in front of Redis that loses answers, cuts connections and goes away."""

from __future__ import annotations

import asyncio
import random
from urllib.parse import urlsplit


class RedisProxy:
    """Forwards to the server behind `url` between `start` and `stop`.

    `loss` is the probability that an answer is lost, and its connection with it: the command was executed, and its
    sender can't know.
    """

    def __init__(self, url: str, *, seed: int = 0) -> None:
        self.lead_to(url)
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._port = 0
        self.loss = 0.0
        self.delay_s = 0.0  # for all that is forwarded, in either direction
        self.num_lost = 0
        self.is_answering = asyncio.Event()  # not set: connections are taken and stay open, and nothing comes back
        self.is_answering.set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    def lead_to(self, url: str) -> None:
        """Forwards new connections to another server, as after a failover."""
        parts = urlsplit(url)
        self._host, self._server_port = parts.hostname or "127.0.0.1", parts.port or 6379

    async def start(self) -> None:
        """Begins to listen; after a `stop`, on the same port as before."""
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuses new connections and cuts existing ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        for writer in self._connections:
            writer.transport.abort()
        self._connections.clear()

    async def __aenter__(self) -> RedisProxy:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        listening = self._server
        try:
            server_reader, server_writer = await asyncio.open_connection(self._host, self._server_port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, server_writer}
        if self._server is not listening:  # stopped meanwhile, perhaps to lead elsewhere
            for end in both:
                end.transport.abort()
            return
        self._connections |= both
        await asyncio.gather(self._pump(reader, server_writer, 0.0), self._pump(server_reader, writer, None))
        for end in both:
            end.transport.abort()
        self._connections -= both

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, loss: float | None) -> None:
        try:
            while data := await source.read(65536):
                if self._random.random() < (self.loss if loss is None else loss):
                    self.num_lost += 1
                    break
                await self.is_answering.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                target.write(data)
                await target.drain()
        except OSError:
            pass
        target.transport.abort()

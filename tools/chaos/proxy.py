"""A TCP proxy in front of Redis that sees every command and every answer, and can be told to hold or lose them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

from hiredis import PushNotification, Reader, pack_command

Command: TypeAlias = list[bytes]
Action: TypeAlias = Callable[[], Awaitable[bool]]
"""Runs before a command or an answer is passed on. False: it is not passed on, and the connection is cut."""

_READ_BYTES = 1 << 16


class Watcher(Protocol):
    """Watches the traffic of one proxy."""

    def before(self, command: Command) -> Action | None:
        """Called when a command is about to be passed on to the server."""

    def after(self, command: Command, answer: Any) -> Action | None:
        """Called when `command` was executed and its answer is about to be passed back."""


class Proxy:
    """Listens on a free port of 127.0.0.1 between `start` and `stop`, and connects each caller to host and port."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._server_port = port
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._watcher: Watcher | None = None
        self.port = 0

    async def start(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        """Cuts all current connections. Callers may connect again."""
        for link in list(self._links):
            link.cut()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(self._host, self._server_port)
        except OSError:
            writer.transport.abort()
            return
        assert self._watcher is not None  # noqa: S101  it listens from `start` on
        link = _Link(reader, writer, server_reader, server_writer, self._watcher)
        self._links.add(link)
        try:
            await link.run()
        except asyncio.CancelledError:  # the run is over; a task made by asyncio.streams must not end cancelled
            return
        finally:
            self._links.discard(link)


class _Link:
    """One caller's connection, and its connection to the server."""

    def __init__(
        self,
        caller_reader: asyncio.StreamReader,
        caller: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server: asyncio.StreamWriter,
        watcher: Watcher,
    ) -> None:
        self._caller_reader = caller_reader
        self._caller = caller
        self._server_reader = server_reader
        self._server = server
        self._watcher = watcher
        self._unanswered: deque[Command] = deque()

    def cut(self) -> None:
        self._caller.transport.abort()
        self._server.transport.abort()

    async def run(self) -> None:
        pumps = [asyncio.create_task(self._pump_commands()), asyncio.create_task(self._pump_answers())]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.cut()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump_commands(self) -> None:
        parser = Reader()
        while data := await self._caller_reader.read(_READ_BYTES):
            parser.feed(data)
            passed: list[bytes] = []
            while (command := parser.gets()) is not False:
                action = self._watcher.before(command)
                if action is not None:
                    self._server.write(b"".join(passed))  # the commands before it were sent long before
                    passed = []
                    if not await action():
                        return
                self._unanswered.append(command)
                passed.append(pack_command(tuple(command)))
            self._server.write(b"".join(passed))
            await self._server.drain()

    async def _pump_answers(self) -> None:
        parser = Reader()
        while data := await self._server_reader.read(_READ_BYTES):
            parser.feed(data)
            while (answer := parser.gets()) is not False:
                if isinstance(answer, PushNotification):
                    continue
                action = self._watcher.after(self._unanswered.popleft(), answer)
                if action is not None and not await action():
                    return
            self._caller.write(data)
            await self._caller.drain()

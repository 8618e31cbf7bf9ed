"""A name that moves: new connections reach another server, and old ones stay with the demoted one.

One real server has the data of both. A link from before the move is answered as by a demoted primary: writes are
refused, and blocking reads bring nothing of the new server.
"""

from __future__ import annotations

import asyncio
from typing import Literal, TypeAlias

from redis import Redis

from tests.support.redis_servers.refusing_proxy import (
    PASSING,
    Command,
    Link,
    RefusingProxy,
    name_of,
    packed,
    read_answer,
)

Demoted: TypeAlias = Literal["quiet", "unblocked", "loading", "reset"]
"""Behaviour of the old server: it lets blocking reads wait, ends them with an error, refuses everything, or is gone."""

UNBLOCKED = b"-UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)\r\n"
NOTHING = b"*-1\r\n"


class MovingName(RefusingProxy):
    """Works like `RefusingProxy` until `demote`.

    Attributes:
        num_open_old: number of open connections that lead to the demoted server.
        num_refused_old: number of writes that were sent to that server.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        with Redis.from_url(url) as server:
            of_writes = server.execute_command("COMMAND LIST FILTERBY ACLCAT write")
        self._writes = {b"EVAL", b"EVALSHA", *(name.upper().partition(b"|")[0] for name in of_writes)} - {b"XINFO"}
        self.num_refused_old = 0
        self._demoted: Demoted | None = None
        self._newest = self._num_moves = 0  # links up to this one lead to the demoted server
        self._changed = asyncio.Event()
        self._open: list[int] = []

    @property
    def num_open_old(self) -> int:
        return sum(self._is_old(made) for made in self._open)

    def demote(self, how: Demoted) -> None:
        """Has the name lead to a demoted server, until `move`."""
        self._demoted, self._newest = how, self._num_moves
        self._change()

    def move(self) -> None:
        """Has new connections reach a server that takes writes."""
        self._num_moves += 1

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self._demoted == "reset":
            self.cut()

    async def _answer_all(
        self,
        commands: asyncio.Queue[Command],
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server: asyncio.StreamWriter,
        link: Link,
    ) -> None:
        made = self._num_moves
        self._open.append(made)
        try:
            await self._answer_link(made, commands, writer, server_reader, server, link)
        finally:
            self._open.remove(made)

    async def _answer_link(
        self,
        made: int,
        commands: asyncio.Queue[Command],
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server: asyncio.StreamWriter,
        link: Link,
    ) -> None:
        while True:
            command = await commands.get()
            if link.is_dead:
                continue
            name = name_of(command)
            self.seen[name] += 1
            answer = None
            if not self._is_old(made):
                answer = self._refusal_of(name) or await self._real_answer(made, command, server_reader, server)
            if answer is None:
                answer = await self._old_answer(command)
            await self.is_answering.wait()
            if not link.is_dead:
                writer.write(answer)
                await writer.drain()
                if answer == UNBLOCKED:
                    return

    def _is_old(self, made: int) -> bool:
        return self._demoted is not None and made <= self._newest

    async def _real_answer(
        self, made: int, command: Command, server_reader: asyncio.StreamReader, server: asyncio.StreamWriter
    ) -> bytes | None:
        """Returns the server's answer; None: the server was demoted while the command waited there."""
        server.write(packed(command))
        reading = asyncio.ensure_future(read_answer(server_reader))
        try:
            while not reading.done():
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({reading, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if not reading.done() and self._is_old(made) and block_s(command) is not None:
                    server.transport.abort()
                    return UNBLOCKED if self._demoted == "unblocked" else None
            return reading.result()
        finally:
            reading.cancel()

    async def _old_answer(self, command: Command) -> bytes:
        if self._demoted == "loading":
            return f"-{PASSING['LOADING']}\r\n".encode()
        if command[0].upper() in self._writes:
            self.num_refused_old += 1
            return f"-{PASSING['READONLY']}\r\n".encode()
        wait_s = block_s(command)
        if wait_s is not None:
            await asyncio.sleep(wait_s)
            return NOTHING
        if command[0].upper() == b"XREAD":  # nothing new arrives there
            return NOTHING
        reader, writer = await asyncio.open_connection(self._host, self._server_port)
        try:
            writer.write(packed(command))
            return await read_answer(reader)
        finally:
            writer.transport.abort()


def block_s(command: Command) -> float | None:
    """Returns how long a read waits at the server; None: it does not."""
    words = [word.upper() for word in command[:10]]
    if words[0] not in (b"XREAD", b"XREADGROUP") or b"BLOCK" not in words:
        return None
    return int(command[words.index(b"BLOCK") + 1]) / 1000

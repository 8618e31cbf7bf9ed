"""The connections to Redis that all queues of one client share. One of them reads all replies."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from penstock.producer.arguments import check_seconds
from penstock.producer.reading.reader import ReplyReader
from penstock.protocol.ids import random_slot
from penstock.protocol.redis.address import Address, parse_url
from penstock.protocol.redis.connection import RedisClient, answered, connect, connect_blocking, on_new_connections
from penstock.protocol.redis.moves import BLOCK_S
from penstock.protocol.redis.pipeline import Batcher

COMMAND_RETRIES = 5
MAX_COMMANDS_IN_FLIGHT = 16
MAX_UNREADABLE = 256  # queues; beyond it the one tried first is forgotten


class Connections:
    """The connections of one client.

    Attributes:
        address: where Redis is; it shows no password.
        reconnect_timeout_s: for how long Redis may stay away.
        has_connected: whether a server has ever answered.
        is_closed: nothing may be sent any more.
        clients: the Redis library's clients in use.
        unreadable: queues that the Redis user may not read, so that each is tried only once.

    Raises:
        BadAddress: the URL can't be used.
        TypeError, ValueError: another argument has the wrong type or is out of range.
    """

    def __init__(
        self, url: str | Address, *, reconnect_timeout_s: float, answer_timeout_s: float | None = None
    ) -> None:
        self.address = _address(url)
        self.reconnect_timeout_s = check_seconds("reconnect_timeout_s", reconnect_timeout_s)
        self.has_connected = False
        self.is_closed = False
        if answer_timeout_s is not None:
            answer_timeout_s = check_seconds("answer_timeout_s", answer_timeout_s, above=0.0)
        self._answer_timeout_s = answer_timeout_s
        self.commands = connect(self.address, decode=False, retries=COMMAND_RETRIES, name="penstock-client")
        on_new_connections(self.commands, self._note_connection)
        self.batcher = Batcher(self.commands, retries=COMMAND_RETRIES)
        self.reader = ReplyReader(self.address, self.commands, self.batcher, give_up_after_s=self.reconnect_timeout_s)
        self.calls = connect_blocking(self.address, decode=False, block_s=BLOCK_S, name="penstock-calls")
        self.clients: tuple[RedisClient, ...] = (self.commands, self.reader.redis, self.calls)
        self.slot = random_slot() if self.address.kind == "cluster" else None
        self.unreadable: deque[str] = deque(maxlen=MAX_UNREADABLE)
        self._loop: asyncio.AbstractEventLoop | None = None  # nobody has used it yet
        self._gate = asyncio.Semaphore(MAX_COMMANDS_IN_FLIGHT)  # each command in flight holds a connection

    def check_loop(self) -> None:
        """Checks that connections and locks are used in the event loop that used them first.

        Raises:
            RuntimeError: this is another event loop.
        """
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise RuntimeError(
                "this AsyncClient was used in another event loop before: make one for each asyncio.run and each thread "
                "(`async with AsyncClient(...)`), or use Client, which any thread may call"
            )

    @property
    def went_with_its_loop(self) -> bool:
        """Whether the event loop that all connections belong to is closed, so that nothing is left to close."""
        return self._loop is not None and self._loop.is_closed()

    @asynccontextmanager
    async def redis(self) -> AsyncIterator[RedisClient]:
        """The client for commands, as soon as a connection is free. Its errors are turned into ours."""
        async with self.answered(), self._gate:
            yield self.commands

    def answered(self) -> AbstractAsyncContextManager[None]:
        """Turns errors of the block's commands into ours. The block may take `answer_timeout_s`.

        Raises:
            RuntimeError: as `check_loop`.
        """
        self.check_loop()
        return answered(self.address, self._answer_timeout_s)

    async def close(self) -> None:
        self.is_closed = True
        await self.reader.close()
        await self.batcher.close()
        await self.calls.aclose()
        await self.commands.aclose()

    async def _note_connection(self) -> None:
        self.has_connected = True


def _address(url: object) -> Address:
    """Parses a URL as `parse_url` does. A value that is not a string is not shown, as it may still hold a password."""
    if isinstance(url, Address):
        return url
    if not isinstance(url, str):
        raise TypeError(f"url must be a str or an Address, not one of type {type(url).__name__}")
    return parse_url(url)

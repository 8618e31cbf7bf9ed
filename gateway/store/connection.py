"""Commands of one process to Redis, besides those of its queue client."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self

from redis import exceptions

from penstock.gateway.damage import GUARD
from penstock.protocol.redis.address import Address, parse_url
from penstock.protocol.redis.connection import RedisClient, answered, connect
from penstock.protocol.redis.pipeline import Batcher

RETRIES = 5

NAME = "penstock-gateway"


class Store:
    """Use it with `async with`. It connects on first use and survives reconnects.

    Args:
        url: where Redis is.
        answer_timeout_s: ConnectionLost after so long without an answer; None: after several tries of 10 s each.

    Attributes:
        address: where Redis is; it shows no password.
        redis: for rare commands; each one in flight holds a connection. Answers are bytes.

    Raises:
        BadAddress: the URL can't be used.
    """

    def __init__(self, url: str | Address, *, answer_timeout_s: float | None = None) -> None:
        self.address = parse_url(url) if isinstance(url, str) else url
        self._answer_timeout_s = answer_timeout_s
        self.redis: RedisClient = connect(self.address, decode=False, retries=RETRIES, name=NAME)
        self._batcher = Batcher(self.redis, retries=RETRIES)

    async def execute(self, *command: str | bytes | int) -> Any:
        """Returns the answer to one command, unconverted; commands of many requests share a few connections.

        Only for commands that may run twice: reads, writes of one value, scripts that notice that they have run.

        Raises:
            ConnectionLost: the server can't be reached or does not answer.
            ServerRefused: the server answered with an error.
        """
        async with self.answered():
            try:
                return await self._batcher.execute(*command)
            except exceptions.ResponseError as error:
                return await GUARD.mend(self.redis, command, error)

    def answered(self) -> AbstractAsyncContextManager[None]:
        """Turns errors of Redis in the block into ours; the block may take `answer_timeout_s`."""
        return answered(self.address, self._answer_timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._batcher.close()
        await self.redis.aclose()

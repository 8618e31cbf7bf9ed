"""Hears of revocations, and ends what is under way for the keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from penstock.gateway.store import names
from penstock.gateway.store.connection import NAME
from penstock.producer.redis.address import Address
from penstock.producer.redis.connection import BACKOFF, RedisClient, connect_blocking, redis_errors
from penstock.producer.redis.streams import read_newest, read_streams
from penstock.producer.tasks import end_tasks

BLOCK_S = 10.0
MAX_NOTICES_A_READ = 100


class RevocationWatch:
    """Reads notices over a connection of its own, for as long as it takes for the next one to come.

    Where Redis was away, it reads on behind the last notice it saw.

    Args:
        address: where Redis is.
        on_revoked: is told the id of each key that is revoked from the start on.
    """

    def __init__(self, address: Address, on_revoked: Callable[[str], None]) -> None:
        self._address = address
        self._on_revoked = on_revoked
        self._redis: RedisClient = connect_blocking(address, decode=False, block_s=BLOCK_S, name=NAME)
        self._cursor: str | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            await end_tasks([task])
            await self._redis.aclose()

    async def _run(self) -> None:
        num_failures = 0
        while True:
            try:
                with redis_errors(self._address):
                    await self._read()
                num_failures = 0
            except Exception as error:  # whatever it is: without this task no stream of a revoked key would end
                num_failures += 1
                if num_failures == 1:  # once per outage
                    structlog.get_logger().warning("revocations_unheard", error=str(error))
                await asyncio.sleep(BACKOFF.compute(num_failures))

    async def _read(self) -> None:
        stream = names.revocation_notices()
        if self._cursor is None:
            newest = await read_newest(self._redis, stream)
            self._cursor = newest[0] if newest else "0-0"
        cursors = {stream: self._cursor}
        for _, entries in await read_streams(self._redis, cursors, count=MAX_NOTICES_A_READ, block_s=BLOCK_S):
            for entry_id, fields in entries:
                self._cursor = entry_id.decode()
                self._on_revoked(fields.get(b"key", b"").decode(errors="replace"))

"""Listens for revocations, and ends the keys' answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from penstock.gateway.standing import RedisHealth
from penstock.gateway.store import names
from penstock.gateway.store.connection import NAME
from penstock.protocol.redis.address import Address
from penstock.protocol.redis.connection import BACKOFF, RedisClient, connect_blocking, redis_errors
from penstock.protocol.redis.moves import BLOCK_S, Witness
from penstock.protocol.redis.streams import read_newest, read_streams
from penstock.protocol.tasks import end_tasks

_log = structlog.get_logger(__name__)

MAX_NOTICES_A_READ = 100
_PART = "revocations"


class RevocationWatch:
    """Reads notices over its own connection, blocking until the next one arrives.

    After an outage of Redis it resumes after the last notice that it saw.

    Args:
        address: where Redis is.
        on_revoked: called with the id of each key revoked from now on.
        standing: notified of trouble with Redis.
    """

    def __init__(self, address: Address, on_revoked: Callable[[str], None], standing: RedisHealth) -> None:
        self._address = address
        self._standing = standing
        self._on_revoked = on_revoked
        self._redis: RedisClient = connect_blocking(address, decode=False, block_s=BLOCK_S, name=NAME)
        self._witness = Witness("EXPIRE", names.probe("keys"), 1)
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
                    await self._read(BLOCK_S if num_failures == 0 else None)  # a return of Redis should be noticed soon
                num_failures = 0
                self._standing.ready(_PART)
            except Exception as error:  # whatever it is: without this task no stream of a revoked key would end
                num_failures += 1
                if not self._standing.lost(error, _PART) and num_failures == 1:
                    _log.warning("revocations_unheard", error=str(error))
                await asyncio.sleep(BACKOFF.compute(num_failures))

    async def _read(self, block_s: float | None) -> None:
        stream = names.revocation_notices()
        if self._cursor is None:
            newest = await read_newest(self._redis, stream)
            self._cursor = newest[0] if newest else "0-0"
        cursors = {stream: self._cursor}
        found = await read_streams(
            self._redis, cursors, count=MAX_NOTICES_A_READ, block_s=block_s, witness=self._witness
        )
        for _, entries in found:
            for entry_id, fields in entries:
                self._cursor = entry_id.decode()
                self._on_revoked(fields.get(b"key", b"").decode(errors="replace"))

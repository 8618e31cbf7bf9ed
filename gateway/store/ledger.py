"""What the gateway's own data may take of Redis's memory: a full server would stop the queue.

What is to be written is charged first, so whoever dies in between leaves a charge that expires and no data that nobody
counts. All replicas charge the same ledger, which is one slot of a cluster; the data lies where its own key says.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import structlog
from redis.asyncio import RedisCluster

from penstock.gateway.errors import ApiError
from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.producer.errors import ServerRefused
from penstock.producer.redis import lua
from penstock.producer.redis.faults import Meaning, meaning_of
from penstock.producer.tasks import Joined

_log = structlog.get_logger(__name__)

LIMIT_MAX_AGE_S = 60.0
UNKNOWN_MEMORY_BYTES = 2**30
"""Of a server that lets nobody see how much it has (`INFO`)."""

OVERHEAD_BYTES = 512
"""Of one thing, on top of its bytes: its key, and what the ledger itself takes for it."""

_CHARGE = lua.load("penstock.gateway.store", "charge")
_NOW = lua.load("penstock.gateway.store", "now")


class Ledger:
    """Counts what is kept, and says no before it is too much.

    Args:
        store: where.
        max_share: of the server's `maxmemory`, or of the machine's memory where it has none; of the smallest server
            of a cluster, as nobody can know where keys will lie. Of `UNKNOWN_MEMORY_BYTES` where it doesn't say.
        max_bytes: another bound; the lower one holds.
    """

    def __init__(self, store: Store, *, max_share: float, max_bytes: int | None = None) -> None:
        self._store = store
        self._max_share = max_share
        self._max_bytes = max_bytes
        self._limit: int | None = None
        self._read_at_s = 0.0
        self._reading = Joined(self._renew_limit)

    async def charge(self, name: str, num_bytes: int, ttl_s: int) -> int:
        """Counts `num_bytes` for `name`, in place of what it had, for `ttl_s` from now.

        Returns:
            The server's clock, in milliseconds.

        Raises:
            ApiError: it would be more than the gateway may keep (507); nothing changed.
            ConnectionLost, ServerRefused: Redis is away or says no.
        """
        limit = await self.limit()
        granted, total, now_ms = await self._run(name, num_bytes + OVERHEAD_BYTES, ttl_s, limit)
        if not granted:
            message = (
                f"the gateway keeps {total} bytes in Redis and may keep {limit}: {num_bytes} more do not fit; delete "
                "what is not needed, wait until something expires, or have nothing kept (store: false)"
            )
            raise ApiError(507, message, type="server_error", code="store_full")
        return now_ms

    async def correct(self, name: str, num_bytes: int) -> None:
        """What turned out to be the size of something that is charged, also where it is too much: it is there."""
        await self._run(name, num_bytes + OVERHEAD_BYTES, 0, 0)

    async def release(self, name: str) -> None:
        """It is gone. Harmless where it was not charged."""
        await self._run(name, 0, 0, 0)

    async def limit(self) -> int:
        """Bytes that may be kept by all gateways together, as the server was set at most a minute ago."""
        if self._limit is None or time.monotonic() - self._read_at_s > LIMIT_MAX_AGE_S:
            return await self._reading.run()
        return self._limit

    async def now_s(self) -> int:
        """The clock that what is charged expires by, in seconds since 1970."""
        return int(await self._store.execute(*lua.call(_NOW, [names.ledger_sizes()], [])))

    async def _renew_limit(self) -> int:
        self._limit = limit = await self._read_limit()
        self._read_at_s = time.monotonic()
        return limit

    async def _run(self, name: str, num_bytes: int, ttl_s: int, limit: int) -> tuple[bool, int, int]:
        key_names = (names.ledger_sizes(), names.ledger_expiries())
        granted, total, now_ms = await self._store.execute(
            *lua.call(_CHARGE, key_names, (name, num_bytes, ttl_s, limit))
        )
        return bool(granted), int(total), int(now_ms)

    async def _read_limit(self) -> int:
        try:
            memory = min(map(_memory, await self._servers()))
        except ServerRefused as error:
            if meaning_of(error) not in (Meaning.NOT_PERMITTED, Meaning.UNKNOWN_COMMAND):
                raise
            return self._without_info(error)
        share = int(memory * self._max_share)
        return max(1, share if self._max_bytes is None else min(share, int(self._max_bytes)))

    def _without_info(self, error: ServerRefused) -> int:
        if self._max_bytes is not None:
            return int(self._max_bytes)
        limit = int(UNKNOWN_MEMORY_BYTES * self._max_share)
        if self._limit != limit:
            _log.warning("memory_unknown", error=str(error), limit=limit, hint="allow INFO, or set max_store_bytes")
        return limit

    async def _servers(self) -> list[Mapping[str, Any]]:
        """What INFO says of the memory of each."""
        redis = self._store.redis
        async with self._store.answered():
            if isinstance(redis, RedisCluster):
                return list((await redis.info("memory", target_nodes=RedisCluster.PRIMARIES)).values())
            return [await redis.info("memory")]


def _memory(server: Mapping[str, Any]) -> int:
    return int(server["maxmemory"] or server["total_system_memory"])

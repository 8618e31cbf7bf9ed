"""Limits the gateway's own data in Redis's memory: a full server would stop the queue.

Data is charged before it is written, so a process that dies in between leaves a charge that expires, and no uncounted
data. All replicas charge the same ledger, in one slot of a cluster; the data lies where its own key says.
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
from penstock.protocol import lua
from penstock.protocol.errors import ServerRefused
from penstock.protocol.redis.faults import Meaning, meaning_of
from penstock.protocol.tasks import Joined

_log = structlog.get_logger(__name__)

LIMIT_MAX_AGE_S = 60.0
UNKNOWN_MEMORY_BYTES = 2**30
"""Memory assumed of a server that does not allow reading it (`INFO`)."""

OVERHEAD_BYTES = 512
"""Overhead of an item: its key, and its entry in the ledger."""

_CHARGE = lua.load("penstock.gateway.store", "charge")
_NOW = lua.load("penstock.gateway.store", "now")


class Ledger:
    """Counts stored data, and refuses before it is too much.

    Args:
        store: holds the ledger.
        max_share: share of the server's `maxmemory`, or of the machine's memory if it has none, or of
            `UNKNOWN_MEMORY_BYTES` if it doesn't say. In a cluster the smallest server counts, as keys may lie anywhere.
        max_bytes: another limit; the lower one applies.
    """

    def __init__(self, store: Store, *, max_share: float, max_bytes: int | None = None) -> None:
        self._store = store
        self._max_share = max_share
        self._max_bytes = max_bytes
        self._limit: int | None = None
        self._read_at_s = 0.0
        self._reading = Joined(self._renew_limit)

    async def charge(self, name: str, num_bytes: int, ttl_s: int) -> int:
        """Charges `num_bytes` to `name` for `ttl_s` from now, in place of its earlier charge.

        Returns:
            The server's clock, in milliseconds.

        Raises:
            ApiError: it would be more than the gateway may keep (507); nothing changed.
            ConnectionLost, ServerRefused: Redis is away or refuses.
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
        """Corrects a charge to the actual size, even if that is too much: the data is there."""
        await self._run(name, num_bytes + OVERHEAD_BYTES, 0, 0)

    async def release(self, name: str) -> None:
        """Removes a charge. Harmless if there was none."""
        await self._run(name, 0, 0, 0)

    async def limit(self) -> int:
        """Returns the bytes that all gateways together may keep, by the server's configuration of at most a minute
        ago.
        """
        if self._limit is None or time.monotonic() - self._read_at_s > LIMIT_MAX_AGE_S:
            return await self._reading.run()
        return self._limit

    async def now_s(self) -> int:
        """Returns the time of the clock by which charges expire, in seconds since 1970."""
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
        """Returns each server's INFO about memory."""
        redis = self._store.redis
        async with self._store.answered():
            if isinstance(redis, RedisCluster):
                return list((await redis.info("memory", target_nodes=RedisCluster.PRIMARIES)).values())
            return [await redis.info("memory")]


def _memory(server: Mapping[str, Any]) -> int:
    return int(server["maxmemory"] or server["total_system_memory"])

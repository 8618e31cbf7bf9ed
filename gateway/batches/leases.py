"""Leases on batches. A gateway that is killed loses its leases, and others take its batches over."""

from __future__ import annotations

from typing import NamedTuple

from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.protocol import lua

_CLAIM = lua.load("penstock.gateway.batches", "claim")
_RENEW = lua.load("penstock.gateway.batches", "renew")
_RELEASE = lua.load("penstock.gateway.batches", "release")


class BatchLease(NamedTuple):
    """Lease on a batch. Each has a larger fencing token than those before."""

    batch_id: str
    token: int


class Leases:
    """Leases in Redis.

    Args:
        store: holds them; times are those of its clock.
        lease_s: how long a lease lasts without renewal.
    """

    def __init__(self, store: Store, lease_s: float) -> None:
        self._store = store
        self._lease_ms = max(1, round(lease_s * 1000))
        self._keys = (names.batch_leases(), names.batch_holders())

    async def offer(self, batch_id: str) -> None:
        """Offers a batch to the runners, unless it is already running."""
        await self._store.execute("ZADD", names.batch_leases(), "NX", 0, batch_id)

    async def claim(self, max_batches: int) -> list[BatchLease]:
        """Takes leases on batches that nobody runs. If the answer is lost, so are the leases, which lapse."""
        answer = await self._store.execute(*lua.call(_CLAIM, self._keys, (self._lease_ms, max_batches)))
        pairs = zip(answer[::2], answer[1::2], strict=True)
        return [BatchLease(batch.decode(errors="replace"), int(token)) for batch, token in pairs]

    async def renew(self, lease: BatchLease) -> bool:
        """Renews a lease. Returns whether it still holds."""
        return bool(await self._store.execute(*lua.call(_RENEW, self._keys, (*lease, self._lease_ms))))

    async def release(self, lease: BatchLease, *, is_over: bool) -> None:
        """Ends a lease: the batch has ended, or is free for another gateway."""
        await self._store.execute(*lua.call(_RELEASE, self._keys, (*lease, int(is_over))))

"""Manages the API keys in one gateway process: checks, limits and revocations."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from penstock.gateway.http.interruptions import Interruptions
from penstock.gateway.keys.cache import KeyCache, revoked
from penstock.gateway.keys.limits import Limiter
from penstock.gateway.keys.published import Published, published
from penstock.gateway.keys.revocations import RevocationWatch
from penstock.gateway.keys.settling import Settling
from penstock.gateway.keys.store import KeyStore
from penstock.gateway.standing import RedisHealth
from penstock.gateway.store.connection import Store
from penstock.producer import AsyncClient


class KeyManager:
    """Use it with `async with`: meanwhile it renews leases, settles tabs and listens for revocations.

    Args:
        store: holds the keys, and the counters for their limits.
        client: a client of any queue.
        interruptions: it ends those of revoked keys.
        standing: notified of trouble with Redis.
        is_key_required: whether to refuse everybody while there are no keys.
    """

    def __init__(
        self,
        store: Store,
        client: AsyncClient,
        interruptions: Interruptions,
        standing: RedisHealth,
        *,
        is_key_required: bool,
    ) -> None:
        self.cache = KeyCache(KeyStore(store.execute), is_required=is_key_required)
        self._store = store
        self._client = client
        self.settling = Settling(store.execute, self._published, standing)
        self.limiter = Limiter(store.execute, self.settling.forget_ended, standing)
        self._interruptions = interruptions
        self._watch = RevocationWatch(store.address, self._on_revoked, standing)
        self._running = AsyncExitStack()

    async def _published(self, queue: str, request_id: str) -> Published:
        return await published(self._store.execute, self._client, queue, request_id)

    def _on_revoked(self, key_id: str) -> None:
        self.cache.forget(key_id)
        self._interruptions.end_key(key_id, revoked(key_id))

    async def __aenter__(self) -> Self:
        await self._running.enter_async_context(self._watch.running())
        await self._running.enter_async_context(self.limiter.running())
        await self._running.enter_async_context(self.settling.running())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._running.aclose()

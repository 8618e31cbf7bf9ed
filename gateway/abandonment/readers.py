"""Tracks which requests have readers, and cancels those without.

A sorted set in Redis has a deadline for each request that clients wait for. Each gateway extends the deadlines of all
its requests that have a reader, in one step. Any gateway cancels overdue requests, so a request ends even if its
gateway was killed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

import structlog

from penstock.gateway.standing import RedisHealth
from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.producer import AsyncClient, PenstockError, ReplyCorrupt, ReplyGone, ReplyStream, ServerRefused
from penstock.protocol import lua
from penstock.protocol.tasks import end_tasks

log = structlog.get_logger(__name__)

ROUNDS = 4  # rounds within the time after which a request counts as abandoned
MAX_OVERDUE = 100  # requests that one gateway takes on at a time
LEASE_MS = 10_000  # for which it holds them exclusively
RETRY_S = 0.5
_PART = "readers"
_REFRESH = lua.load("penstock.gateway.abandonment", "refresh")
_OVERDUE = lua.load("penstock.gateway.abandonment", "overdue")


class AbandonmentWatch:
    """One process's watch. Use it with `async with`.

    Args:
        store: holds the deadlines.
        client: of any queue; used to cancel.
        standing: notified of trouble with Redis.
        abandon_after_s: how long a request continues without a reader; a quarter longer if a gateway was killed.
    """

    def __init__(self, store: Store, client: AsyncClient, standing: RedisHealth, abandon_after_s: float) -> None:
        self._store = store
        self._client = client
        self._standing = standing
        self._round_s = abandon_after_s / ROUNDS
        self._patience_ms = max(1, round(abandon_after_s * 1000))
        self._deadline_ms = self._patience_ms + max(1, round(self._round_s * 1000))
        self._readers: Counter[str] = Counter()
        self._to_put_off: set[str] = set()
        self._over: set[str] = set()
        self._has_news = asyncio.Event()

    @contextmanager
    def reading(self, queue: str, reply: ReplyStream) -> Iterator[None]:
        """Notes a reader during the block. It needs no connection, and waits for nothing."""
        member = f"{queue} {reply.request_id}"
        self._readers[member] += 1
        self._note(self._to_put_off, member)
        try:
            yield
        finally:
            self._readers[member] -= 1
            if not self._readers[member]:
                del self._readers[member]
            if reply.has_ended:
                self._to_put_off.discard(member)
                self._note(self._over, member)
            else:
                self._note(self._to_put_off, member)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="penstock-watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await end_tasks([self._task])

    def _note(self, where: set[str], member: str) -> None:
        where.add(member)
        self._has_news.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_round, is_well = loop.time(), True
        while True:
            try:
                if loop.time() >= next_round:
                    next_round = loop.time() + self._round_s
                    await self._go_round()
                else:
                    await self._tell()
                is_well = True
                self._standing.ready(_PART)
            except Exception as error:  # whatever it is, all requests depend on this task
                if not self._standing.lost(error, _PART) and is_well:  # once, until it is well again
                    log.warning("readers_unknown", error=str(error), exc_info=not isinstance(error, PenstockError))
                is_well, next_round = False, min(next_round, loop.time())
                await asyncio.sleep(min(RETRY_S, self._round_s))
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(next_round):
                        await self._has_news.wait()

    async def _go_round(self) -> None:
        self._to_put_off.update(self._readers)
        await self._tell()
        await self._cancel_overdue()

    async def _tell(self) -> None:
        """Reports readers that came and left. What fails is reported the next time."""
        self._has_news.clear()
        over, put_off = tuple(self._over), tuple(self._to_put_off)
        if put_off:
            await self._store.execute(*lua.call(_REFRESH, [names.readers()], [self._deadline_ms, *put_off]))
            self._to_put_off.difference_update(put_off)
        if over:
            await self._store.execute("ZREM", names.readers(), *over)
            self._over.difference_update(over)

    async def _cancel_overdue(self) -> None:
        for member in await self._take_overdue():
            queue, _, request_id = member.partition(" ")
            try:
                await self._cancel(queue, request_id)
            except (ReplyGone, ReplyCorrupt, ValueError):  # the request is over, or the name is not one of a request
                pass
            except ServerRefused as error:
                if not error.is_junk:
                    raise
            await self._store.execute("ZREM", names.readers(), member)

    async def _take_overdue(self) -> list[str]:
        """Returns overdue requests that no other gateway has taken."""
        keys = [names.readers(), names.swept()]
        members: list[bytes] = await self._store.execute(
            *lua.call(_OVERDUE, keys, (MAX_OVERDUE, self._patience_ms, LEASE_MS))
        )
        return [member.decode(errors="replace") for member in members]

    async def _cancel(self, queue: str, request_id: str) -> None:
        handle = self._client.handle(request_id, queue=queue)
        if await handle.state() in ("queued", "running", "lost"):
            log.info("request_abandoned", queue=queue, request_id=request_id)
            await handle.cancel()

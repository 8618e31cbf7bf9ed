"""State of a gateway process's access to Redis: what is wrong, and when that is over. All its parts report to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Self

import structlog

from penstock.gateway.directory import Directory
from penstock.gateway.errors import ApiError, api_error
from penstock.gateway.store.connection import Store
from penstock.gateway.store.probe import probe
from penstock.producer import PenstockError
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.faults import Trouble, is_refused, may_pass
from penstock.protocol.tasks import Joined, end_tasks
from penstock.serving.readiness import Readiness
from penstock.serving.refusals import Refusals

_log = structlog.get_logger(__name__)

MAX_AGE_S = 1.0
"""Shortest time between two checks of Redis, however many ask."""

LOOK_EVERY_S = 0.5  # while something is wrong
HOLD_S = 1.0
"""A refusal this recent counts, whatever a check finds: it may be about commands that a check does not use."""

_REQUESTS = "requests"  # the part for HTTP requests, which a check can declare well again


class RedisHealth:
    """Use it with `async with`. It logs one line for an outage, whichever part meets it, and one for its end.

    Args:
        store: where a check writes.
        directory: what a check reads.
        clients: all connections of the process; they reconnect if user or password have changed.
        refused_drain_after_s: how long Redis may refuse permanently.

    Attributes:
        must_drain: set once Redis has refused for longer.
    """

    def __init__(
        self, store: Store, directory: Directory, clients: Collection[RedisClient], refused_drain_after_s: float
    ) -> None:
        self._store = store
        self._directory = directory
        self._readiness = Readiness(str(store.address))
        self._refusals = Refusals(clients, store.address, refused_drain_after_s, self._readiness)
        self._looking = Joined(self._look)
        self._looked_s = self._lost_s = -max(MAX_AGE_S, HOLD_S)
        self._is_lost = asyncio.Event()
        self._is_lost.set()  # nobody has checked yet

    @property
    def reasons(self) -> Mapping[str, str]:
        """The reasons why the process is not ready, by its parts, as far as known."""
        return self._readiness.reasons

    @property
    def trouble(self) -> Trouble | None:
        return self._readiness.trouble

    @property
    def must_drain(self) -> asyncio.Event:
        return self._refusals.must_drain

    async def check(self) -> None:
        """Checks Redis, unless that was done a moment ago."""
        if time.monotonic() - self._looked_s >= MAX_AGE_S:
            await self._looking.run()

    def told(self, error: PenstockError) -> ApiError:
        """Notes an error, and returns what its client learns."""
        self.lost(error)
        return api_error(error)

    def lost(self, error: Exception, part: str = _REQUESTS) -> bool:
        """Notes an error of a part that will retry. Returns whether Redis is the reason: then no other part has to log
        it.
        """
        if not (may_pass(error) or is_refused(error)):
            return False
        said = error.__cause__ if isinstance(error.__cause__, Exception) else error  # ours names the address
        self._readiness.lost_redis(part, said)
        if part == _REQUESTS:
            self._lost_s = time.monotonic()
            self._is_lost.set()
        return True

    def ready(self, part: str) -> None:
        """Notes that a part had an answer."""
        self._readiness.ready(part)

    def hear(self, slot: int, error: Exception | None) -> None:
        """Hears of errors in reading replies, whose streams wait meanwhile; in a cluster those of one hash slot."""
        part = f"streams {slot}" if slot else "streams"
        if error is None:
            self.ready(part)
        elif not self.lost(error, part):
            _log.warning("replies_unread", error=type(error).__name__)

    async def _look(self) -> None:
        try:
            await asyncio.gather(self._directory.cards(), probe(self._store))
        except PenstockError as error:
            self.lost(error)
        else:
            if time.monotonic() - self._lost_s >= HOLD_S:
                self._readiness.ready(_REQUESTS)
                self._is_lost.clear()
        self._looked_s = time.monotonic()

    async def _keep_looking(self) -> None:
        while True:
            await self._is_lost.wait()
            await asyncio.sleep(LOOK_EVERY_S)
            await self._looking.run()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep_looking()), asyncio.create_task(self._refusals.run())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await end_tasks(self._tasks)
        await self._looking.close()

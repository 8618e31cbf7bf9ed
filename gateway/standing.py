"""How a gateway process stands with Redis: what is wrong, and when that is over. All its parts tell it."""

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
from penstock.producer.redis.connection import RedisClient
from penstock.producer.redis.faults import Trouble, is_refused, may_pass
from penstock.producer.serving.readiness import Readiness
from penstock.producer.serving.refusals import Refusals
from penstock.producer.tasks import Joined, end_tasks

_log = structlog.get_logger(__name__)

MAX_AGE_S = 1.0
"""However many ask, Redis is looked at no more often than that."""

LOOK_EVERY_S = 0.5  # while something is wrong
HOLD_S = 1.0
"""What was refused so shortly ago counts, whatever a look finds: it may be about commands that a look does without."""

_REQUESTS = "requests"  # the part of whoever asks by HTTP, of which a look tells that it is over


class Standing:
    """Use it with `async with`. What it logs is one line for an outage, whoever meets it, and one for its end.

    Args:
        store: where a look writes.
        directory: what a look reads.
        clients: all connections of the process, which are made anew where user or password have changed.
        refused_drain_after_s: for how long Redis may refuse for good.

    Attributes:
        must_drain: set once it has refused for longer.
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
        self._is_lost.set()  # nobody has looked

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why the process is not ready, by its parts, as far as is known."""
        return self._readiness.reasons

    @property
    def trouble(self) -> Trouble | None:
        return self._readiness.trouble

    @property
    def must_drain(self) -> asyncio.Event:
        return self._refusals.must_drain

    async def check(self) -> None:
        """Finds out, unless that was done a moment ago."""
        if time.monotonic() - self._looked_s >= MAX_AGE_S:
            await self._looking.run()

    def told(self, error: PenstockError) -> ApiError:
        """What whoever asked is told of an error, which is noted."""
        self.lost(error)
        return api_error(error)

    def lost(self, error: Exception, part: str = _REQUESTS) -> bool:
        """Notes an error of a part that will try again. Whether Redis is the reason: no other part has to log it."""
        if not (may_pass(error) or is_refused(error)):
            return False
        said = error.__cause__ if isinstance(error.__cause__, Exception) else error  # ours names the address
        self._readiness.lost_redis(part, said)
        if part == _REQUESTS:
            self._lost_s = time.monotonic()
            self._is_lost.set()
        return True

    def ready(self, part: str) -> None:
        """A part had an answer."""
        self._readiness.ready(part)

    def hear(self, slot: int, error: Exception | None) -> None:
        """Of the reading of replies, whose streams wait meanwhile; of one hash slot under a cluster."""
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

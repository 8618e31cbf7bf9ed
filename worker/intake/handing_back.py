"""Gives running requests back: their tokens are on the reply streams, and the next worker continues from there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

from penstock.engine.driver import EngineDriver
from penstock.protocol import scripts
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.faults import is_junk
from penstock.protocol.redis.pipeline import execute
from penstock.protocol.wire import GenerateRequest
from penstock.worker.config import WorkerConfig
from penstock.worker.metrics import WorkerMetrics
from penstock.worker.publish.outbox import Outbox
from penstock.worker.publish.publisher import Publisher
from penstock.worker.redis import retries
from penstock.worker.redis.guarded import execute_one
from penstock.worker.run.entries import ENTRIES_PER_READ
from penstock.worker.run.requests import LiveRequest, Phase

HAND_OVER_TIMEOUT_S = 1.0
GIVES_WAY_BELOW = 0  # requests of this priority or higher are never given back for others
MAX_HANDBACKS = 8  # most hand-backs of a request: each costs a prefill, and it has to finish some day


class HandingBack:
    """Releases requests of this worker so that none of their tokens is lost or computed twice.

    Args:
        redis: for the steps on the requests' states and entries.
        config: the queue's and the worker's names.
        driver: runs the requests.
        outbox: holds what the requests have generated.
        publisher: writes what the outbox holds.
        metrics: counts the hand-backs.
    """

    def __init__(
        self,
        redis: RedisClient,
        config: WorkerConfig,
        driver: EngineDriver,
        outbox: Outbox,
        publisher: Publisher,
        metrics: WorkerMetrics,
    ) -> None:
        self._redis = redis
        self._config = config
        self._driver = driver
        self._outbox = outbox
        self._publisher = publisher
        self._requests = outbox.requests
        self._metrics = metrics
        self._leaving: set[str] = set()  # ids of those that are giving way

    async def give_back_all(self) -> None:
        """Gives all requests back, to workers with room. They wait ahead of newer ones of their tenant and priority.

        While the server refuses, this keeps trying.
        """
        await self._stop(self._requests)
        await self._publisher.wait_idle()
        lives = list(self._requests)
        entry_ids = [*(live.entry_id for live in lives), *self._requests.parked]
        backoff = retries.Backoff()
        while True:
            try:
                return await self._give_back(lives, entry_ids, handbacks=1)
            except retries.REDIS_ERRORS as error:
                if not retries.must_wait(error):
                    raise
            await asyncio.sleep(backoff.next_s())

    async def let_wait(self, entry_ids: Sequence[str], *, has_had: bool) -> None:
        """Makes entries that are pending here wait again. With `has_had`, they go ahead of newer ones of their tenant.

        Raises:
            RedisError: the server is in trouble.
        """
        left = list(entry_ids)
        while left:
            command = scripts.put_back(
                self._config.queue, worker=self._config.name, entry_ids=left[:ENTRIES_PER_READ], has_had=has_had
            )
            looked_at, _ = await execute_one(self._redis, command)
            del left[:looked_at]

    @property
    def num_able(self) -> int:
        """Number of requests here that may be given back to make room for others."""
        return sum(1 for _ in self._able())

    async def make_room(self, count: int) -> None:
        """Makes up to `count` requests give way to a higher priority: those that are cheapest to restart.

        They wait again, ahead of later ones of their tenant.

        Raises:
            RedisError: the server is in trouble; they are claimed again here.
        """
        lives = sorted(self._able(), key=lambda live: (_priority(live), live.prompt_tokens + live.completion_tokens))
        await self._let_wait(lives[:count], handbacks=1)

    async def make_way(self) -> None:
        """Makes everything that has not ended wait again, so that a suspect can run alone. This does not count as a
        hand-back.

        This worker holds none of it when the suspect begins, so a crash of the suspect is not held against the others.

        Raises:
            RedisError: the server is in trouble; they are claimed again here.
        """
        preparing = [live for live in self._requests if live.phase < Phase.RUNNING]
        for live in preparing:
            self._requests.remove(live)  # so that none of them reaches the engine any more
        try:
            await self._let_wait([live for live in self._requests if live.is_running], preparing, handbacks=0)
        except retries.REDIS_ERRORS:
            self._requests.recover()
            raise

    async def _let_wait(
        self, lives: Sequence[LiveRequest], others: Sequence[LiveRequest] = (), *, handbacks: int
    ) -> None:
        """Puts back `lives`, which the engine has, and `others`, which it does not have."""
        ids = {live.id for live in lives}
        self._leaving |= ids
        try:
            await self._stop(lives)
            await self._publisher.wait_published(lives)
            left = [*others, *(live for live in lives if not (live.has_ended or live.is_gone))]
            await self._give_back(left, [live.entry_id for live in left], handbacks)
        except retries.REDIS_ERRORS:
            for live in lives:
                if not live.is_gone:
                    self._requests.let_go(live)  # the engine no longer has it
            raise
        finally:
            self._leaving -= ids

    def _able(self) -> Iterable[LiveRequest]:
        return (
            live
            for live in self._requests
            if live.phase is Phase.RUNNING
            and live.id not in self._leaving
            and _priority(live) < GIVES_WAY_BELOW
            and live.claim.handbacks < MAX_HANDBACKS
        )

    async def _stop(self, lives: Iterable[LiveRequest]) -> None:
        """Stops requests, and collects what they generated, unless the step takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_TIMEOUT_S):
                await self._driver.hand_over()
        for live in lives:
            self._driver.forget(live.id)
            self._outbox.flush_soon(live)

    async def _give_back(self, lives: Sequence[LiveRequest], entry_ids: Sequence[str], handbacks: int) -> None:
        returns = [
            scripts.return_request(live.queue, live.id, epoch=live.claim.epoch, handbacks=handbacks) for live in lives
        ]
        for answer in await execute(self._redis, returns) if returns else ():
            if isinstance(answer, Exception) and not is_junk(answer):  # its next claim ends it
                raise answer
        await self.let_wait(entry_ids, has_had=True)
        for live in lives:
            self._requests.remove(live)
            live.trace.handed_back(live.completion_tokens)
            live.log.info("request_handed_back", epoch=live.claim.epoch, completion_tokens=live.completion_tokens)
        self._metrics.handed_back.inc(len(lives))


def _priority(live: LiveRequest) -> int:
    return live.asked.priority if isinstance(live.asked, GenerateRequest) else GIVES_WAY_BELOW

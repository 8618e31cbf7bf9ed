"""Ends requests early: those somebody asked to cancel, and those whose time is up."""

from __future__ import annotations

import asyncio
import time

from penstock.engine.driver import EngineDriver
from penstock.engine.request import FinishReason
from penstock.producer import keys
from penstock.producer.redis.connection import RedisClient
from penstock.producer.redis.pipeline import execute
from penstock.worker.delivery.outbox import Outbox
from penstock.worker.delivery.requests import LiveRequest, Phase
from penstock.worker.protocol import faults
from penstock.worker.readiness import Readiness

_PART = "cancel"  # in readiness


class CancelWatch:
    """Looks for cancel flags with one pipeline per poll, and only while something runs. Needs no help from readers."""

    def __init__(
        self, redis: RedisClient, outbox: Outbox, driver: EngineDriver, readiness: Readiness, *, poll_s: float
    ) -> None:
        self._redis = redis
        self._outbox = outbox
        self._requests = outbox.requests
        self._driver = driver
        self._readiness = readiness
        self._poll_s = poll_s

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            while not len(self._requests):
                self._readiness.ready(_PART)  # nobody needs it
                await self._requests.changed.wait()
            await asyncio.sleep(self._until_next(time.monotonic()))
            self._expire(time.monotonic())
            await faults.survive(self._poll(), _PART, self._readiness)

    def _until_next(self, now_s: float) -> float:
        deadlines = [live.deadline_s for live in self._watched() if live.deadline_s is not None]
        return max(0.01, min([self._poll_s, *(deadline_s - now_s for deadline_s in deadlines)]))

    def _expire(self, now_s: float) -> None:
        for live in self._watched():
            if live.is_overdue(now_s):
                self._end(live, "expired")

    async def _poll(self) -> None:
        lives = self._watched()
        if not lives:
            return
        answers = await execute(self._redis, [("EXISTS", keys.cancel(live.queue, live.id)) for live in lives])
        for live, is_cancelled in zip(lives, answers, strict=True):
            if isinstance(is_cancelled, Exception):
                raise is_cancelled
            if is_cancelled:
                self._end(live, "cancelled")

    def _watched(self) -> list[LiveRequest]:
        """One that is still being restored asks for itself."""
        return [live for live in self._requests if live.phase in (Phase.ADMITTED, Phase.RUNNING)]

    def _end(self, live: LiveRequest, reason: FinishReason) -> None:
        if live.is_running:
            self._driver.abort(live.id, reason)
        elif live.phase < Phase.ENDED:
            self._outbox.end(live, reason)

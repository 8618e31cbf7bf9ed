"""Ends requests early: those somebody asked to cancel, and those whose time is up."""

from __future__ import annotations

import asyncio
import time

from penstock.engine.driver import EngineDriver
from penstock.engine.request import FinishReason
from penstock.producer import keys
from penstock.producer.connection import RedisClient
from penstock.producer.pipeline import execute
from penstock.worker.config import WorkerConfig
from penstock.worker.delivery.publisher import Publisher
from penstock.worker.delivery.requests import LiveRequest, LiveTable
from penstock.worker.protocol import faults
from penstock.worker.readiness import Readiness


class CancelWatch:
    """Looks for cancel flags with one pipeline per poll, and only while something runs. Needs no help from readers."""

    def __init__(
        self,
        redis: RedisClient,
        config: WorkerConfig,
        driver: EngineDriver,
        table: LiveTable,
        publisher: Publisher,
        readiness: Readiness,
    ) -> None:
        self._redis = redis
        self._config = config
        self._driver = driver
        self._table = table
        self._publisher = publisher
        self._readiness = readiness

    async def run(self) -> None:
        """Watches until cancelled."""
        poll_s = self._config.cancel_poll_ms / 1000
        while True:
            while not len(self._table):
                await self._table.changed.wait()
            await asyncio.sleep(self._until_next(time.monotonic(), poll_s))
            self._expire(time.monotonic())
            await faults.survive(self._poll(), "cancel", self._readiness)

    def _until_next(self, now_s: float, poll_s: float) -> float:
        deadlines = [live.deadline_s for live in self._table if live.deadline_s is not None]
        return max(0.01, min([poll_s, *(deadline_s - now_s for deadline_s in deadlines)]))

    def _expire(self, now_s: float) -> None:
        for live in self._table:
            if live.is_admitted and live.deadline_s is not None and live.deadline_s <= now_s:
                live.deadline_s = None
                self._end(live, "expired")

    async def _poll(self) -> None:
        lives = [live for live in self._table if live.is_admitted and live.end is None]
        if not lives:
            return
        answers = await execute(self._redis, [("EXISTS", keys.cancel(self._config.queue, live.id)) for live in lives])
        for live, is_cancelled in zip(lives, answers, strict=True):
            if isinstance(is_cancelled, Exception):
                raise is_cancelled
            if is_cancelled:
                self._end(live, "cancelled")

    def _end(self, live: LiveRequest, reason: FinishReason) -> None:
        if live.is_submitted:
            self._driver.abort(live.id, reason)
        else:
            self._publisher.end(live, reason)

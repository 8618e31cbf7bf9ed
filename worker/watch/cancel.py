"""Ends requests early: those that somebody cancelled, and those whose deadline has passed."""

from __future__ import annotations

import asyncio
import time

from penstock.engine.driver import EngineDriver
from penstock.engine.request import FinishReason
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.pipeline import execute
from penstock.protocol.tasks import end_tasks
from penstock.serving.readiness import Readiness
from penstock.worker.publish.outbox import Outbox
from penstock.worker.redis import retries
from penstock.worker.run.requests import LiveRequest, Parked, Phase

_PART = "cancel"  # name in readiness
_FOLLOWS = 8  # looks are this much more frequent while they find cancellations, which free room for others


class CancelWatch:
    """Looks for cancel flags with one pipeline per poll, and only while there are requests. Needs no help from readers.

    Deadlines do not wait for an answer from Redis.
    """

    def __init__(
        self, redis: RedisClient, outbox: Outbox, driver: EngineDriver, readiness: Readiness, *, poll_s: float
    ) -> None:
        self._redis = redis
        self._outbox = outbox
        self._requests = outbox.requests
        self._driver = driver
        self._readiness = readiness
        self._poll_s = self._pause_s = poll_s

    async def run(self) -> None:
        """Watches until cancelled."""
        poll: asyncio.Task[bool] | None = None
        try:
            while True:
                while not (len(self._requests) or self._requests.parked):
                    self._readiness.ready(_PART)  # nothing depends on it
                    await self._requests.changed.wait()
                await asyncio.sleep(self._seconds_until_next(time.monotonic()))
                self._expire(time.monotonic())
                if poll is None or poll.done():
                    if poll is not None:
                        poll.result()
                    poll = asyncio.create_task(
                        retries.survive(self._poll(), _PART, self._readiness), name="cancel poll"
                    )
        finally:
            await end_tasks([] if poll is None else [poll])

    def _seconds_until_next(self, now_s: float) -> float:
        deadlines = [each.deadline_s for each in self._watched() if each.deadline_s is not None]
        return max(0.01, min([self._pause_s, *(deadline_s - now_s for deadline_s in deadlines)]))

    def _expire(self, now_s: float) -> None:
        for each in self._watched():
            if each.is_overdue(now_s):
                self._end(each, "expired")

    async def _poll(self) -> None:
        watched = self._watched()
        if not watched:
            return
        answers = await execute(self._redis, [("EXISTS", keys.cancel(each.queue, each.id)) for each in watched])
        for is_cancelled in answers:
            if isinstance(is_cancelled, Exception):
                raise is_cancelled
        self._pause_s = self._poll_s / _FOLLOWS if any(answers) else self._poll_s
        for each, is_cancelled in zip(watched, answers, strict=True):
            if is_cancelled:
                self._end(each, "cancelled")

    def _watched(self) -> list[LiveRequest | Parked]:
        """Returns the requests that may be ended now: before a journal is read, the content of an end is unknown."""
        lives = (live for live in self._requests if Phase.RESTORED <= live.phase <= Phase.RUNNING)
        return [*lives, *self._requests.parked.values()]

    def _end(self, live: LiveRequest | Parked, reason: FinishReason) -> None:
        if isinstance(live, Parked):
            self._requests.end_parked(live)
        elif live.is_running:
            self._driver.abort(live.id, reason)
        elif live.phase < Phase.ENDED:
            self._outbox.end(live, reason)

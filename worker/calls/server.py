"""Takes calls from their stream and answers them, while the engine generates."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

import structlog

from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.faults import is_junk, is_no_group
from penstock.protocol.redis.streams import pairs, stream_entries
from penstock.protocol.tasks import end_tasks
from penstock.serving.readiness import Readiness
from penstock.worker.calls.answering import Answer, Answerer, refusal
from penstock.worker.config import WorkerConfig
from penstock.worker.metrics import WorkerMetrics
from penstock.worker.redis import retries
from penstock.worker.redis.guarded import execute_one, make_guarded_group
from penstock.worker.run.entries import QueueEntry
from penstock.worker.tasks import pause

_log = structlog.get_logger(__name__)
_PART, _ANSWERS = "calls", "answers"  # names in readiness

MAX_AT_ONCE = 8  # calls that one worker answers at once; the others are left to workers with less to do
BYTES_PER_READ = 4 << 20
HOLD_S = 1.0  # between two renewals of the calls it holds
IDLE_MS = 3000  # a call that was not renewed for that long is taken over
LATE_S = 2.0  # a blocking read that ends this much late by the server's clock is cancelled; its call is taken over
MAX_TRIES = 3  # workers that a call may bring down
ANSWER_TTL_MS = 60_000


class CallServer:
    """Serves calls in one loop, whose reads never wait for the engine.

    The worker that holds a call answers and removes it in one step, so each call is answered once. A worker that dies
    or hangs loses its calls to the others within seconds. There is no claim and no fencing token, as an answer that is
    computed twice does no harm.
    """

    def __init__(
        self,
        redis: RedisClient,
        blocking: RedisClient,
        config: WorkerConfig,
        answerer: Answerer,
        metrics: WorkerMetrics,
        readiness: Readiness,
    ) -> None:
        self._redis = redis
        self._blocking = blocking
        self._config = config
        self._answerer = answerer
        self._metrics = metrics
        self._readiness = readiness
        self._stopping = asyncio.Event()
        self._backoff = retries.Backoff()
        self._has_group = False
        self._is_readable = True  # whether the stream is readable, as far as is known
        self._in_hand: dict[str, asyncio.Task[None]] = {}  # by entry
        self._failures: list[BaseException] = []  # errors that ended some of them

    def stop(self) -> None:
        """Lets `run` return once the calls it holds are answered."""
        self._stopping.set()

    async def run(self) -> None:
        """Answers calls until `stop`."""
        try:
            while self._in_hand or not self._stopping.is_set():
                await self._try(self._round())
        finally:
            await end_tasks(self._in_hand.values())
            self._answerer.close()

    async def _round(self) -> None:
        if self._failures:
            raise self._failures.pop()
        if not self._has_group:
            await make_guarded_group(self._redis, keys.calls(self._config.queue))
            self._has_group = True
        spare = 0 if self._stopping.is_set() else MAX_AT_ONCE - len(self._in_hand)
        if taken := await self._take(spare):
            for entry, times in taken:
                self._begin(entry, times)
        elif spare:
            for entry in await self._wait_for_one():
                self._begin(entry, times=1)
        elif self._in_hand:
            await asyncio.wait(self._in_hand.values(), timeout=HOLD_S, return_when=asyncio.FIRST_COMPLETED)

    async def _take(self, count: int) -> list[tuple[QueueEntry, int]]:
        """Takes up to `count` calls, each with how often it was taken."""
        command = scripts.take_calls(
            self._config.queue,
            worker=self._config.name,
            count=count,
            max_body_bytes=self._config.max_body_bytes,
            max_bytes=BYTES_PER_READ,
            idle_ms=IDLE_MS,
            in_hand=self._in_hand,
        )
        answer: Any = await execute_one(self._redis, command)
        return [
            (QueueEntry(entry_id.decode(), pairs(fields), size, bool(is_whole)), times)
            for entry_id, size, is_whole, fields, times in answer
        ]

    async def _wait_for_one(self) -> list[QueueEntry]:
        """Waits for a call. If the wait is cancelled just as a call arrives, that call is taken over later."""
        block_ms = min(self._config.block_ms, round(HOLD_S * 1000))
        calls = keys.calls(self._config.queue)
        try:
            async with asyncio.timeout(block_ms / 1000 + LATE_S) as limit:
                answer = await self._blocking.xreadgroup(
                    keys.GROUP, self._config.name, {calls: ">"}, count=1, block=block_ms
                )
        except TimeoutError:
            if not limit.expired():
                raise
            return []  # the server uses its own clock, which may have been set back
        return [
            QueueEntry.of(entry_id.decode(), fields, self._config.max_body_bytes)
            for _, entries in stream_entries(answer)
            for entry_id, fields in entries
        ]

    def _begin(self, entry: QueueEntry, times: int) -> None:
        task = asyncio.create_task(self._answer(entry, times), name="call")
        self._in_hand[entry.id] = task
        task.add_done_callback(partial(self._note_done, entry.id))

    def _note_done(self, entry_id: str, task: asyncio.Task[None]) -> None:
        del self._in_hand[entry_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)

    async def _answer(self, entry: QueueEntry, times: int) -> None:
        if times > MAX_TRIES:
            _log.warning("call_given_up", entry=entry.id, times=times)
            answer = refusal("internal_error", f"{times - 1} workers took this call and did not get to an answer")
        else:
            answer = await self._answerer.answer(entry)
        backoff, never = retries.Backoff(), asyncio.Event()
        while not await self._try_publish(entry, answer):
            await pause(never, backoff.next_s())

    async def _try_publish(self, entry: QueueEntry, answer: Answer) -> bool:
        """Tries to publish; False: the server accepts nothing now. The call is kept, as its next worker would start
        over.
        """
        try:
            await self._publish(entry, answer)
        except (*retries.REDIS_ERRORS, OSError) as error:
            if not retries.must_wait(error):
                raise
            self._readiness.lost_redis(_ANSWERS, error)
            return False
        self._readiness.ready(_ANSWERS)
        return True

    async def _publish(self, entry: QueueEntry, answer: Answer) -> None:
        envelope = await self._answerer.envelope(entry)
        command = scripts.answer_call(
            self._config.queue,
            envelope,
            worker=self._config.name,
            entry_id=entry.id,
            ttl_ms=ANSWER_TTL_MS,
            fields={"id": envelope.id, "worker": self._config.name, **answer},
        )
        if await execute_one(self._redis, command):
            self._metrics.calls.labels(outcome=answer.get("code", "answered")).inc()

    async def _try(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
            self._backoff.reset()
            self._readiness.ready(_PART)
            self._is_readable = True
        except (*retries.REDIS_ERRORS, OSError) as error:
            if is_no_group(error):  # the stream expired, or was lost with Redis's data
                self._has_group = False
                return
            self._has_group = self._has_group and not is_junk(error)  # making the group sets junk aside
            if retries.must_wait(error):
                self._readiness.lost_redis(_PART, error)
            elif self._is_readable:  # logged once; requests are served all the same
                self._is_readable = False
                _log.warning("calls_unreadable", key=keys.calls(self._config.queue), error=str(error))
            await pause(self._stopping, self._backoff.next_s())

"""Sends the outbox's writes: one pipeline per flush; nothing is lost or doubled when Redis is in trouble."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from redis import exceptions

from penstock.protocol import scripts
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.pipeline import Reconnected, execute
from penstock.serving.readiness import Readiness
from penstock.worker.metrics import WorkerMetrics
from penstock.worker.publish.coalescing import Coalescing
from penstock.worker.publish.ending import count_loss, log_losses, observe_end, observe_letter, observe_refusal
from penstock.worker.publish.outbox import Bury, Drop, Fence, Finished, Outbox, Verdict, WriteRefused
from penstock.worker.publish.reconnect import Reconnects, look_back
from penstock.worker.publish.writes import AsideWrite, Burial, Write, is_published
from penstock.worker.redis import retries
from penstock.worker.redis.guarded import GUARD
from penstock.worker.run.requests import LiveRequest
from penstock.worker.tasks import Signal

_PART = "publisher"  # name in readiness


class Publisher:
    """Writes what the outbox decides, and acts on the answers. While writes fail, none is lost."""

    def __init__(
        self, redis: RedisClient, outbox: Outbox, coalescing: Coalescing, metrics: WorkerMetrics, readiness: Readiness
    ) -> None:
        self._redis = redis
        self._outbox = outbox
        self._requests = outbox.requests
        self._coalescing = coalescing
        self._metrics = metrics
        self._readiness = readiness
        self._backoff = retries.Backoff()
        self._reconnects = Reconnects(redis, self._requests.recover)
        self._is_writing = False
        self._lost: list[tuple[LiveRequest, str]] = []  # in this flush
        self._flushed = Signal()

    async def wait_idle(self) -> None:
        """Waits until everything that was put into the outbox is written."""
        while self._is_writing or not self._outbox.is_empty:
            await self._flushed.wait()

    async def wait_published(self, lives: Collection[LiveRequest]) -> None:
        """Waits until all output of some requests is on their reply streams, or they are no longer this worker's."""
        while not all(map(is_published, lives)):
            await self._flushed.wait()

    async def run(self) -> None:
        """Writes until cancelled. A cancelled flush may or may not have reached the server."""
        while True:
            await self._wait_due()
            self._coalescing.look()
            self._is_writing = True
            try:
                await self._flush(self._outbox.collect(time.monotonic()))
            finally:
                self._is_writing = False
                self._log_losses()
                self._flushed.fire()

    async def _wait_due(self) -> None:
        while True:
            due_s = self._outbox.due_s()
            wait_s = None if due_s is None else due_s - time.monotonic()
            if wait_s is not None and wait_s <= 0:
                return
            self._outbox.news.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._outbox.news.wait()
            except TimeoutError:
                return

    async def _flush(self, batch: Sequence[Write]) -> None:
        started_s = time.monotonic()
        try:
            batch, answers = await self._send(batch)
        except (*retries.REDIS_ERRORS, OSError) as error:
            self._reconnects.note()
            lost = error if retries.must_wait(error) else exceptions.ConnectionError(f"no answer: {error}")
            answers = [lost] * len(batch)  # no single write is to blame
        before = self._outbox.num_chunks, self._outbox.num_tokens, self._outbox.num_absorbed
        for write, answer in zip(batch, answers, strict=True):
            self._settle(write, await self._mended(write, answer))
        self._note_trouble(next((answer for answer in answers if _must_wait(answer)), None))
        self._metrics.chunks.inc(self._outbox.num_chunks - before[0])
        self._metrics.tokens.inc(self._outbox.num_tokens - before[1])
        self._metrics.absorbed_retries.inc(self._outbox.num_absorbed - before[2])
        self._metrics.flush_seconds.observe(time.monotonic() - started_s)

    async def _send(self, batch: Sequence[Write]) -> tuple[Sequence[Write], list[Any]]:
        """Sends the writes that still make sense on this server; returns them and their answers."""
        reconnects = self._reconnects
        while True:
            await reconnects.prepare()
            if not reconnects.is_checked:
                count = reconnects.count
                await self._look_back()
                batch = self._outbox.still_valid(batch)
                reconnects.note_checked(count)
            try:
                with reconnects.looking(partial(self._check_batch, batch)):
                    commands = [write.command for write in batch]
                    return batch, await execute(self._redis, commands, lambda: reconnects.is_checked)
            except Reconnected:
                continue

    async def _check_batch(self, batch: Sequence[Write]) -> None:
        """Checks a connection that is made while `batch` is being sent.

        Raises:
            Reconnected: some of the writes are void on its server.
        """
        await self._look_back()
        if any(self._outbox.is_void(write) for write in batch):
            raise Reconnected

    async def _look_back(self) -> None:
        for verdict in await look_back(self._redis, self._requests):
            self._act(verdict)

    async def _mended(self, write: Write, answer: Any) -> Any:
        """Returns the answer to a write. If foreign data in a queue's key blocked a removal, sets it aside first."""
        if not isinstance(answer, Exception) or not isinstance(write, AsideWrite | Burial):
            return answer
        try:
            return await GUARD.mend(self._redis, write.command, answer)
        except Exception as error:
            return error

    def _settle(self, write: Write, answer: Any) -> None:
        verdict = self._outbox.settle(write, answer, time.monotonic())
        if verdict is not None:
            self._act(verdict)

    def _act(self, verdict: Verdict) -> None:
        match verdict:
            case Drop(live, why):
                self._let_go(live, why)
            case Fence(live):
                if not live.is_gone:
                    self._outbox.tell(scripts.absolve(live.queue, live.id, epoch=live.claim.epoch))
                    self._let_go(live, "fenced")
            case Bury(live, error):
                if not live.is_gone:
                    live.log.error("reply_unwritable", error=str(error))
                    self._outbox.give_up(live)
                    observe_letter(self._metrics, self._outbox.bury(live, "reply_unwritable", str(error)))
                    self._let_go(live, "unwritable")
            case Finished(live, end, letter):
                if letter is not None:
                    observe_letter(self._metrics, letter)
                self._requests.note_end(live)
                observe_end(self._metrics, live, end)
            case WriteRefused(write, error):
                observe_refusal(self._metrics, write, error)

    def _let_go(self, live: LiveRequest, why: str) -> None:
        if not live.is_gone:
            self._requests.let_go(live)
            count_loss(self._metrics, live, why)
            self._lost.append((live, why))

    def _log_losses(self) -> None:
        log_losses(self._lost)
        self._lost.clear()

    def _note_trouble(self, error: Exception | None) -> None:
        was_stuck = self._outbox.is_stuck
        self._outbox.is_stuck = self._outbox.num_unsettled > 0
        if error is None:
            self._backoff.reset()
            self._readiness.ready(_PART)
            if was_stuck and not self._outbox.is_stuck:
                self._requests.changed.fire()
            return
        self._outbox.retry_at_s = time.monotonic() + self._backoff.next_s()
        self._metrics.publish_failures.inc()
        self._readiness.lost_redis(_PART, error)


def _must_wait(answer: Any) -> bool:
    return isinstance(answer, Exception) and retries.must_wait(answer)

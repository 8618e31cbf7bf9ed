"""Brings outputs to the reply streams: one pipeline per flush, and nothing lost or doubled when Redis is in trouble."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import structlog
from redis.asyncio import RedisCluster

from penstock.engine.request import FinishReason, Output
from penstock.producer.connection import RedisClient
from penstock.producer.pipeline import Command, Reconnected, execute
from penstock.worker.config import WorkerConfig
from penstock.worker.delivery import reconnect, writes
from penstock.worker.delivery.coalescing import Coalescing
from penstock.worker.delivery.ending import dead_letter, end_entry, observe_end
from penstock.worker.delivery.journal import JournalError
from penstock.worker.delivery.reconnect import Reconnects
from penstock.worker.delivery.removals import Removals
from penstock.worker.delivery.requests import Burial, LiveRequest, LiveTable, Signal
from penstock.worker.delivery.writes import (
    AsideWrite,
    ChunkWrite,
    EndCheck,
    FinishWrite,
    ProbeWrite,
    RefreshWrite,
    Write,
)
from penstock.worker.errors import RedisRefused
from penstock.worker.metrics import Metrics
from penstock.worker.protocol import faults, scripts
from penstock.worker.readiness import Readiness

_log = structlog.get_logger(__name__)
_PART = "publisher"  # in readiness


class Publisher:
    """Collects outputs and writes them, first tokens at once, the rest as often as `coalescing` says.

    Ends do not wait either, unless processors are short: then they go with the chunks of what still runs.

    Of each request at most one flush is under way: what comes meanwhile waits in the request itself, so that the
    buffer is bounded by what the running requests may generate. While writes fail, the intake takes no new ones.
    """

    def __init__(
        self,
        redis: RedisClient,
        config: WorkerConfig,
        table: LiveTable,
        metrics: Metrics,
        readiness: Readiness,
        coalescing: Coalescing,
        abort: Callable[[str], None],
    ) -> None:
        self._redis = redis
        self._config = config
        self._table = table
        self._metrics = metrics
        self._readiness = readiness
        self._abort = abort  # tells the engine that nobody wants the rest of a request
        self._urgent: dict[LiveRequest, None] = {}
        self._dirty: dict[LiveRequest, None] = {}
        self.removals = Removals(config, has_nodes=isinstance(redis, RedisCluster))
        self._aside: list[Write] = []
        self._unsettled: list[Write] = []  # sent, or tried to; the server's answer is not known or was "not now"
        self._coalescing = coalescing
        self._backoff = faults.Backoff()
        self._retry_at_s = 0.0
        self._flushed_at_s = 0.0
        self._wake = asyncio.Event()
        self._is_writing = False
        self.is_troubled = False  # writes wait for Redis to take them, also while they are tried again
        self._num_chunks = 0  # confirmed by the flush under way
        self._num_tokens = 0
        self.has_dropped = False  # until the intake has looked whether the entry is still pending here
        self._reconnects = Reconnects(redis, self._look_at_entries)
        self._num_trusted = 0  # reconnects up to which the server is known to have what was written
        self.settled = Signal()  # fires after each flush

    @property
    def is_idle(self) -> bool:
        """Whether everything handed over is written."""
        return not (
            self._urgent
            or self._dirty
            or not self.removals.is_empty
            or self._aside
            or self._unsettled
            or self._is_writing
        )

    def push(self, live: LiveRequest, output: Output) -> None:
        """The engine's sink for one request."""
        if not live.dropped:
            live.add(output)
            if live.end is not None:
                self._hurry_end(live)
            if live.urgent or live not in self._dirty:
                self._schedule(live)
        self._table.changed.fire()

    def end(self, live: LiveRequest, reason: FinishReason) -> None:
        """Ends a request that the engine does not have. One that has ended keeps its end."""
        if live.end is not None:
            return
        live.end = reason
        live.urgent = True
        self._schedule(live)

    def drop(self, live: LiveRequest, why: str) -> None:
        """Lets go of a request that is another owner's, or gone."""
        if live.dropped:
            return
        live.dropped = True
        self._urgent.pop(live, None)
        self._dirty.pop(live, None)
        self._table.remove(live)
        self.has_dropped = True
        self._abort(live.id)
        self.settled.fire()
        self._metrics.dropped.labels(reason=why).inc()
        live.log.warning("request_dropped", reason=why, epoch=live.claim.epoch)

    def acknowledge(self, entry_id: str) -> None:
        """Removes an entry from the queue with the next flush, if it is still this worker's."""
        self._remove(entry_id)

    def tell(self, end: Command) -> None:
        """Writes the end of a request that this worker could not claim, with the next flush."""
        self._aside.append(AsideWrite(end))
        self._wake.set()

    def bury(self, burial: Burial) -> None:
        """Moves an entry to the dead letters (`penstock.worker.delivery.ending.dead_letter`) with the next flush."""
        self._note_letter(burial)
        self._remove(burial)

    def _note_letter(self, burial: Burial) -> None:
        self._metrics.dead_letters.labels(kind="malformed" if burial.is_malformed else "request").inc()

    def _remove(self, entry: str | Burial) -> None:
        self.removals.add(entry)
        self._wake.set()

    def flush_soon(self, live: LiveRequest) -> None:
        """Writes what there is of a request without waiting for the interval."""
        live.urgent = True
        self._schedule(live)

    async def wait_idle(self) -> None:
        while not self.is_idle:
            await self.settled.wait()

    async def run(self) -> None:
        """Writes until cancelled. A cancelled flush may or may not have reached the server.

        Raises:
            RedisRefused: the server will go on refusing.
        """
        while True:
            await self._wait_due()
            self._coalescing.look()
            batch = self._collect(time.monotonic())
            self._is_writing = True
            try:
                await self._send(batch)
            finally:
                self._is_writing = False
                self.settled.fire()

    def _hurry_end(self, live: LiveRequest) -> None:
        if not self._coalescing.is_stretched:
            live.urgent = True
        elif all(other.end is not None for other in self._table):  # it leaves the engine nothing to do
            self._flushed_at_s = 0.0
            self._wake.set()

    def _schedule(self, live: LiveRequest) -> None:
        if live.num_unsettled or live.dropped:
            return  # `_release` comes back to it
        if live.urgent:
            self._dirty.pop(live, None)  # a request is in one of the two, or it would be taken twice
            self._urgent[live] = None
            self._wake.set()
        elif live.end is not None or writes.has_any_news(live):
            if not self._dirty:
                self._wake.set()
            self._dirty[live] = None

    async def _wait_due(self) -> None:
        while True:
            due_s = self._due_s()
            wait_s = None if due_s is None else due_s - time.monotonic()
            if wait_s is not None and wait_s <= 0:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                return

    def _due_s(self) -> float | None:
        """When there is something to write (monotonic); None while there is nothing."""
        if self._unsettled:
            return self._retry_at_s  # whatever stands in their way would stop the others too
        if self._urgent or self._aside:
            return 0.0
        next_flush_s = self._flushed_at_s + self._coalescing.interval_s
        return next_flush_s if self._dirty else self.removals.due_s(next_flush_s)

    def _collect(self, now_s: float) -> list[Write]:
        batch, self._unsettled = self._unsettled, []
        lives = self._urgent
        self._urgent = {}
        if now_s - self._flushed_at_s >= self._coalescing.interval_s or not self._dirty:
            lives |= self._dirty
            self._dirty = {}
            self._flushed_at_s = now_s
        for live in lives:
            taken = self._take(live)
            live.num_unsettled += len(taken)
            batch += taken
            if now_s >= live.refresh_at_s:
                live.refresh_at_s = now_s + self._config.reply_ttl_s / 2
                batch += writes.refresh(live, round(self._config.reply_ttl_s * 1000))
        batch += self._aside
        self._aside = []
        return batch + self.removals.collect(now_s)

    def _take(self, live: LiveRequest) -> list[Write]:
        live.urgent = False
        if live.end is not None:
            ttl_ms = round(self._config.reply_ttl_after_end_s * 1000)
            return [writes.take_end(live, end_entry(live, live.end), ttl_ms=ttl_ms)]
        return [writes.take_chunk(live, choice) for choice in live.choices if writes.has_news(live, choice)]

    async def _send(self, batch: Sequence[Write]) -> None:
        started_s = time.monotonic()
        try:
            batch, answers = await self._execute(batch)
        except Exception as error:
            self._refuse_if_final(error)
            if not faults.is_passing(error):
                raise
            self._reconnects.note()
            answers = [error] * len(batch)
        passing = None
        for write, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception) and faults.is_passing(answer):
                passing = answer
                self._unsettled.append(write)
            else:
                self._settle(write, answer)
        self._note_trouble(passing)
        self._metrics.chunks.inc(self._num_chunks)
        self._metrics.tokens.inc(self._num_tokens)
        self._num_chunks = self._num_tokens = 0
        self._metrics.flush_seconds.observe(time.monotonic() - started_s)

    async def _execute(self, batch: Sequence[Write]) -> tuple[Sequence[Write], list[Any]]:
        """Sends those of the writes that still make sense on this server; returns them and their answers."""
        while True:
            if self._num_trusted != self._reconnects.count:
                count = self._reconnects.count
                await self._check_memory()
                batch = [write for write in batch if not self._is_void(write) or self._withdraw(write)]
                self._num_trusted = count
            commands = [write.command for write in batch]
            try:
                with self._reconnects.looking(partial(self._check_batch, batch)):
                    answers = await execute(self._redis, commands, lambda: self._num_trusted == self._reconnects.count)
            except Reconnected:
                continue
            return batch, answers

    async def _check_batch(self, batch: Sequence[Write]) -> None:
        """For a connection that is made while `batch` is being sent.

        Raises:
            Reconnected: some of the writes are void on the server that it leads to.
        """
        await self._check_memory()
        if any(self._is_void(write) for write in batch):
            raise Reconnected

    async def _check_memory(self) -> None:
        """Lets go of requests of whose reply the server has lost entries, or that have another owner there."""
        lives = list(self._table)
        if not lives:
            return
        answers = await execute(self._redis, [scripts.newest(live.queue, live.id) for live in lives])
        for error in answers:
            if isinstance(error, Exception) and faults.is_passing(error):
                raise error
        for live, answer in zip(lives, answers, strict=True):
            if isinstance(answer, Exception):  # its own writes will meet the same
                continue
            verdict = reconnect.judge(live, scripts.parse_standing(answer))
            if verdict == "fenced":
                self._fence(live)
            elif verdict != "kept":
                self.drop(live, verdict)

    def _is_void(self, write: Write) -> bool:
        """Whether a write was meant for another server: its request was let go of, or it removes an entry whose end may
        be unknown here. The intake finds such an entry pending, and the claim tells whether its reply has ended.
        """
        match write:
            case ChunkWrite() | FinishWrite():
                return write.live.dropped
            case ProbeWrite():
                return write.chunk.live.dropped
            case AsideWrite() | Burial():
                return bool(write.entry_ids)
            case EndCheck() | RefreshWrite():
                return False

    def _withdraw(self, write: Write) -> Literal[False]:
        """Does not send what is void."""
        if not isinstance(write, AsideWrite | Burial) or not self.removals.doubt(write):
            self._look_at_entries()  # again: the end was perhaps not yet known when the intake looked
        return False

    def _look_at_entries(self) -> None:
        self.has_dropped = True
        self._table.changed.fire()

    def _note_trouble(self, error: Exception | None) -> None:
        self.is_troubled = error is not None or bool(self._unsettled)  # a look at a refused chunk waits too
        if error is None:
            self._backoff.reset()
            self._readiness.ready(_PART)
            return
        self._retry_at_s = time.monotonic() + self._backoff.next_s()
        self._metrics.publish_failures.inc()
        self._readiness.not_ready(_PART, f"Redis does not take writes: {error}")
        _log.warning("publish_failed", error=str(error), writes=len(self._unsettled))

    def _settle(self, write: Write, answer: Any) -> None:
        match write:
            case ChunkWrite():
                self._settle_chunk(write, answer)
            case ProbeWrite():
                self._settle_probe(write.chunk, answer)
            case FinishWrite():
                self._settle_finish(write, answer)
            case EndCheck():
                if not self.removals.settle_check(write, answer):
                    self._look_at_entries()
            case Burial():
                self._settle_burial(write, answer)
            case AsideWrite() | RefreshWrite():
                self._settle_other(write, answer)

    def _settle_chunk(self, write: ChunkWrite, answer: Any) -> None:
        if isinstance(answer, Exception):
            if faults.is_stale_id(answer):
                self._unsettled.append(ProbeWrite.of(write))
            else:
                self._spoil(write.live, answer)
        elif answer is None:  # NOMKSTREAM: the reply stream has expired or was deleted
            self.drop(write.live, "gone")
        else:
            self._confirm(write)

    def _settle_probe(self, chunk: ChunkWrite, answer: Any) -> None:
        """A refused chunk is there (an earlier sending arrived), or a later claim is, or it can never arrive."""
        if isinstance(answer, Exception):
            self._spoil(chunk.live, answer)
            return
        found = scripts.parse_standing(answer)
        if found.entry_id is None:
            self.drop(chunk.live, "gone")
        elif not found.is_of(chunk.live.claim):
            self._fence(chunk.live)
        elif chunk.is_in(found):
            self._metrics.absorbed_retries.inc()
            self._confirm(chunk)
        elif found.entry_id == chunk.entry_id:  # written by nobody who keeps to the protocol
            self._spoil(chunk.live, JournalError(f"reply entry {chunk.entry_id} is not what was written there"))
        else:
            writes.put_back(chunk)
            self._release(chunk.live)

    def _settle_finish(self, write: FinishWrite, answer: Any) -> None:
        live = write.live
        if isinstance(answer, Exception):
            self._spoil(live, answer)
        elif answer == b"fenced":
            self._fence(live)
        elif answer == b"lost":
            self.drop(live, "rolled_back")
        else:
            if live.dead_letter is not None:
                self._note_letter(live.dead_letter)
            self.removals.add_ended(live)
            live.dropped = True
            self._table.remove(live)
            observe_end(self._metrics, live, write.end)

    def _settle_burial(self, burial: Burial, answer: Any) -> None:
        """A letter that Redis refuses for good is lost: its entry leaves the queue all the same, or it never would."""
        if not isinstance(answer, Exception) or faults.is_no_group(answer):
            self.removals.settle(burial)
            return
        self._refuse_if_final(answer)
        self._metrics.lost_dead_letters.inc()
        what = {"request_id": burial.request_id, "entry": burial.entry_id, "code": burial.code}
        _log.error("dead_letter_lost", **what, error=str(answer))
        self.removals.give_up(burial)
        self._wake.set()

    def _settle_other(self, write: AsideWrite | RefreshWrite, answer: Any) -> None:
        if isinstance(write, AsideWrite):
            self.removals.settle(write)
        if isinstance(answer, Exception) and not faults.is_no_group(answer):
            self._refuse_if_final(answer)
            _log.error("write_refused", command=write.command[0], error=str(answer))

    def _confirm(self, write: ChunkWrite) -> None:
        write.choice.num_published += len(write.token_ids)
        write.choice.is_closed |= write.is_last
        write.live.last_number = max(write.live.last_number, write.number)
        self._num_chunks += 1
        self._num_tokens += len(write.token_ids)
        self._release(write.live)

    def _release(self, live: LiveRequest) -> None:
        live.num_unsettled -= 1
        self._schedule(live)

    def _fence(self, live: LiveRequest) -> None:
        """Another worker took this one for dead. The request is not to blame."""
        if not live.dropped:
            self._aside.append(AsideWrite(scripts.absolve(live.queue, live.id, epoch=live.claim.epoch)))
            self.drop(live, "fenced")

    def _spoil(self, live: LiveRequest, error: Exception) -> None:
        """Gives a request up whose keys Redis refuses to write, for instance because they hold something else."""
        self._refuse_if_final(error)
        live.log.error("reply_unwritable", error=str(error))
        self.bury(dead_letter(live, "reply_unwritable", str(error), self._config))
        self.drop(live, "unwritable")

    def _refuse_if_final(self, error: Exception) -> None:
        if faults.is_final(error):
            raise RedisRefused(f"Redis refuses what a worker must do: {error}") from error

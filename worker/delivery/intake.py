"""Takes entries from the request stream: never more than the engine can run now, and none is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from typing import Any

import structlog
from redis import exceptions

from penstock.engine.driver import EngineDriver
from penstock.producer.connection import RedisClient, ensure_group
from penstock.worker.config import WorkerConfig
from penstock.worker.delivery.claiming import Admitted, Claimer, Suspect
from penstock.worker.delivery.entries import EntryReader, QueueEntry
from penstock.worker.delivery.publisher import Publisher
from penstock.worker.delivery.requests import LiveTable
from penstock.worker.errors import RedisRefused
from penstock.worker.protocol import faults
from penstock.worker.protocol.heartbeat import Heartbeat
from penstock.worker.readiness import Readiness
from penstock.worker.tasks import end_tasks, pause

_log = structlog.get_logger(__name__)
_PART = "intake"  # in readiness

SLOW_S = 0.05  # an entry that takes longer to get ready keeps those behind it waiting no more


class Intake:
    """One loop: entries of dead or draining workers first, then new ones.

    The blocking read has a connection of its own and is never cancelled: an entry that arrives then would be pending
    here and known to nobody. It is short, and `stop` waits for it. Whenever something went wrong in between, the own
    pending entries are read again.
    """

    def __init__(
        self,
        redis: RedisClient,
        blocking: RedisClient,
        config: WorkerConfig,
        driver: EngineDriver,
        table: LiveTable,
        publisher: Publisher,
        claimer: Claimer,
        heartbeat: Heartbeat,
        readiness: Readiness,
    ) -> None:
        self._redis = redis
        self._entries = EntryReader(redis, blocking, config)
        self._config = config
        self._driver = driver
        self._table = table
        self._publisher = publisher
        self._claimer = claimer
        self._heartbeat = heartbeat
        self._readiness = readiness
        self._stopping = asyncio.Event()
        self._backoff = faults.Backoff()
        self._adopt_at_s = 0.0
        driver.watch_room(table.changed.fire)
        self._must_recover = True  # a process of the same name may have died with entries pending
        self.parked: dict[str, QueueEntry] = {}  # entries of suspects, pending here until they can run alone
        self._taking: dict[asyncio.Task[None], str] = {}  # what gets entries ready that were read
        self._failures: list[BaseException] = []  # what ended some of it

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Lets `run` return once what was read is in the engine's hands or known to the table of live requests."""
        self._stopping.set()
        self._table.changed.fire()
        self._publisher.settled.fire()

    async def run(self) -> None:
        """Reads until `stop`.

        Raises:
            RedisRefused: the server will go on refusing.
            DriverStopped: the engine's thread is not running.
        """
        try:
            while not self._stopping.is_set():
                await self._try(self._round())
            await self._try(self._until_taken())
        finally:
            await end_tasks(self._taking)

    async def _try(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
            self._backoff.reset()
            self._readiness.ready(_PART)
        except exceptions.RedisError as error:
            await self._survive(error)

    async def _round(self) -> None:
        if (self._needs_recovery or self._heartbeat.is_contested) and (left_s := await self._heartbeat.beat()):
            # Another process has the name, and what is pending under it: claiming that would fence the other one.
            await self._pause(left_s)
            return
        if self._needs_recovery:
            self._must_recover = self._publisher.has_dropped = False
            await self._recover()
        await self._run_suspects()
        spare = await self._wait_for_room()
        if not spare or self._stopping.is_set():
            return
        await self._take_on(await self._adopt(spare) or await self._entries.take(spare) or await self._wait_for_one())

    @property
    def _needs_recovery(self) -> bool:
        return self._must_recover or self._publisher.has_dropped

    async def _survive(self, error: exceptions.RedisError) -> None:
        self._must_recover = True
        if faults.is_no_group(error):
            await self._make_group()
            return
        if faults.is_final(error):
            raise RedisRefused(f"Redis refuses what a worker must do: {error}") from error
        if not faults.is_passing(error):
            raise error
        self._readiness.not_ready(_PART, f"no requests from Redis: {error}")
        _log.warning("read_failed", error=str(error))
        await self._pause(self._backoff.next_s())

    async def _make_group(self) -> None:
        """After FLUSHALL or a failover to an empty server: at 0, so that nothing enqueued since is missed."""
        try:
            await ensure_group(self._redis, self._config.queue)
        except exceptions.RedisError as error:
            if not faults.is_passing(error):
                raise
            await self._pause(self._backoff.next_s())

    async def _pause(self, delay_s: float) -> None:
        await pause(self._stopping, delay_s)

    async def _wait_for_room(self) -> int:
        while not self._stopping.is_set() and not self._publisher.has_dropped:
            self._raise_failure()
            if self._publisher.is_troubled:
                await self._publisher.settled.wait()
            elif (spare := self._driver.spare - len(self._taking)) > 0:
                return spare
            else:
                await self._table.changed.wait()
        return 0

    async def _recover(self) -> None:
        """Takes on what is pending here and not being worked on: its reading, or its claim, failed half-way."""
        last = "0-0"
        while not self._stopping.is_set():
            known = self._known()  # what leaves the queue meanwhile may still be on the page
            entries = await self._entries.pending(after=last)
            if not entries:
                return
            last = entries[-1].id
            known |= self._known()
            await self._take_on([entry for entry in entries if entry.id not in known])

    def _known(self) -> set[str]:
        """Entries that are being worked on, or about to leave."""
        leaving = self._publisher.removals.entry_ids()
        return {*self._table.entry_ids(), *leaving, *self.parked, *self._taking.values()}

    async def _adopt(self, spare: int) -> list[QueueEntry]:
        """Entries that nobody owns. While there are any it looks again at once, otherwise every `block_ms`."""
        now_s = time.monotonic()
        if now_s < self._adopt_at_s:
            return []
        entries = await self._entries.adopt(spare)
        if not entries:
            self._adopt_at_s = now_s + self._config.block_ms / 1000
        return entries

    async def _wait_for_one(self) -> list[QueueEntry]:
        """Until it is time to look for entries that nobody owns again."""
        return await self._entries.wait_for_one(max(1, round((self._adopt_at_s - time.monotonic()) * 1000)))

    async def _take_on(self, entries: Iterable[QueueEntry]) -> None:
        """Claims entries side by side, and hands each to the engine as soon as it is ready.

        Returns when all are, or the rest takes long (a chat template may): that goes on beside what is read next.
        """
        tasks = [self._start_taking(entry) for entry in entries]
        if tasks:
            await asyncio.wait(tasks, timeout=SLOW_S)
        self._raise_failure()

    def _start_taking(self, entry: QueueEntry) -> asyncio.Task[None]:
        task = asyncio.create_task(self._take_on_one(entry), name="taking")
        self._taking[task] = entry.id
        task.add_done_callback(self._note_taken)
        return task

    def _note_taken(self, task: asyncio.Task[None]) -> None:
        del self._taking[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)
        self._table.changed.fire()

    async def _until_taken(self) -> None:
        while self._taking:
            await self._table.changed.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failures:
            failures, self._failures = self._failures, []
            raise failures[0]

    async def _take_on_one(self, entry: QueueEntry) -> None:
        if entry.is_deleted:
            self._publisher.acknowledge(entry.id)
            return
        try:
            admitted = await self._claimer.admit(entry)
        except Suspect:
            self.parked[entry.id] = entry
            return
        if admitted is not None:
            await self._submit(admitted)

    async def _submit(self, admitted: Admitted) -> None:
        while self._driver.is_active(admitted.live.id):  # an earlier claim of this worker, which the engine is dropping
            await self._table.changed.wait()
        self._claimer.submit(admitted)

    async def _run_suspects(self) -> None:
        """Runs requests that were there at several crashes one by one, so that no other pays for them."""
        while self.parked:
            while self._is_busy() and not self._stopping.is_set():
                await self._table.changed.wait()
            if self._stopping.is_set():
                return
            entry = self.parked.pop(next(iter(self.parked)))
            _log.warning("running_alone", entry=entry.id)
            admitted = await self._claimer.admit(entry, alone=True)
            if admitted is None:
                continue
            await self._submit(admitted)
            while self._table.get(admitted.live.id) is admitted.live and not self._stopping.is_set():
                await self._table.changed.wait()

    def _is_busy(self) -> bool:
        return bool(self._taking) or any(live.is_submitted for live in self._table)

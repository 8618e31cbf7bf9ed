"""Takes entries from the request stream: never more than the engine can run now, and without leaving any behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from penstock.engine.driver import EngineDriver
from penstock.engine.request import Request
from penstock.protocol.redis.faults import is_junk, is_no_group
from penstock.protocol.tasks import end_tasks
from penstock.serving.readiness import Readiness
from penstock.worker.intake.claiming import Claimer, GoesOn, Occupied, Suspect
from penstock.worker.intake.handing_back import GIVES_WAY_BELOW, HandingBack
from penstock.worker.intake.restore import Restorer, ending_failed
from penstock.worker.intake.suspects import Suspects
from penstock.worker.presence.heartbeat import Heartbeat
from penstock.worker.publish.outbox import Outbox
from penstock.worker.redis import retries
from penstock.worker.run.entries import EntryReader, QueueEntry
from penstock.worker.run.requests import LiveRequest, Parked
from penstock.worker.tasks import pause

_log = structlog.get_logger(__name__)
_PART = "intake"  # name in readiness

SLOW_S = 0.05  # an entry that takes longer to prepare no longer holds up those behind it


class Intake:
    """Takes what is next whenever the engine has room, in one loop.

    The blocking read is not cancelled while the worker goes on: an entry that arrived just then would be pending here,
    and nobody would know of it. The read is short, and `stop` waits for it. After any failure, the worker reads its
    pending entries again.
    """

    def __init__(
        self,
        entries: EntryReader,
        claimer: Claimer,
        restorer: Restorer,
        driver: EngineDriver,
        outbox: Outbox,
        handing_back: HandingBack,
        suspects: Suspects,
        heartbeat: Heartbeat,
        readiness: Readiness,
    ) -> None:
        self._entries = entries
        self._claimer = claimer
        self._restorer = restorer
        self._driver = driver
        self._outbox = outbox
        self._requests = outbox.requests
        self._handing_back = handing_back
        self._suspects = suspects
        self._heartbeat = heartbeat
        self._readiness = readiness
        self._stopping = asyncio.Event()
        self._backoff = retries.Backoff()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._passed_over: set[str] = set()  # entries that a sweep found but that were known here
        self._failures: list[BaseException] = []  # errors that ended some of them
        entries.on_broken = self._requests.recover
        driver.watch_capacity(self._requests.changed.fire)

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Lets `run` return once every entry read is with the engine or in the table of requests."""
        self._stopping.set()
        self._requests.changed.fire()

    async def sweep(self) -> None:
        """Gives new entries their places, and ends those that need no run, whether or not the engine has room.

        Raises:
            RedisError: the server is in trouble.
        """
        if self._passed_over - self._known():  # it was on its way back to the queue, and is pending here now
            self._passed_over.clear()
            self._requests.recover()
        has_more = True
        while has_more and not (self.is_stopping or self._heartbeat.is_contested):
            try:
                swept = await self._entries.sweep()
            except retries.REDIS_ERRORS:
                self._requests.recover()  # entries of the lost answer are pending here
                raise
            known = self._known()  # a recovery may have found them before the answer came
            tasks = [self._start_ending(entry) for entry in swept.entries if entry.id not in known]
            self._passed_over |= known & {entry.id for entry in swept.entries}
            has_more = swept.has_more
            if has_more and tasks:
                await asyncio.wait(tasks)

    async def run(self) -> None:
        """Reads until `stop`.

        Raises:
            DriverStopped: the engine's thread is not running.
        """
        try:
            while not self._stopping.is_set():
                await self._try(self._round())
            await self._try(self._wait_until_taken())
        finally:
            await end_tasks(self._tasks)

    async def _round(self) -> None:
        if not await self._look_for_own():
            return
        if (suspect := self._suspects.next) is not None:
            await self._run_alone(suspect)
            others_come_first = not (self._is_held_up or self._suspects.is_due)
            if others_come_first and (spare := self._spare):
                await self._take_on_all(await self._entries.take(spare, waits=not self._requests.parked))
            return
        await self._wait_for_capacity()
        if self._is_interrupted:
            return
        if spare := self._spare:
            await self._take_on_all(await self._entries.take(spare))
        else:
            await self._take_urgent()

    async def _look_for_own(self) -> bool:
        """Takes on entries that are pending here but unknown.

        False: another process has the name, and the entries pending under it. Claiming them would fence that process.
        """
        self._raise_failure()
        if (self._requests.must_recover or self._heartbeat.is_contested) and (left_s := await self._heartbeat.beat()):
            await pause(self._stopping, left_s)
            return False
        if self._requests.must_recover:
            self._requests.must_recover = False
            await self._recover()
        return True

    async def _take_on(self, entry: QueueEntry, *, alone: bool = False, only_over: bool = False) -> LiveRequest | None:
        """Brings one entry to the engine. None: it waits, perhaps until it can run alone, or leaves the queue.

        With `only_over`, the entry is only ended, or goes back to the queue.
        """
        try:
            live = await self._claimer.claim(entry, alone=alone, only_over=only_over)
        except GoesOn:
            await self._handing_back.let_wait([entry.id], has_had=False)
            return None
        except Suspect as suspect:
            self._suspects.park(suspect.live, entry)
            return None
        except Occupied:
            await self._handing_back.let_wait([entry.id], has_had=True)
            return None
        if live is None:
            return None
        request = await self._restorer.restore(live)
        if request is not None:
            await self._submit(live, request)
        return live

    async def _submit(self, live: LiveRequest, request: Request) -> None:
        """Hands a request to the engine, unless it has ended in the meantime."""
        while self._driver.is_active(live.id):  # an earlier claim by this worker, which the engine is dropping
            await self._requests.changed.wait()
        if live.has_ended or live.is_gone:
            return
        with ending_failed(live, self._outbox):
            self._driver.submit(request, partial(self._outbox.push, live))
            live.start()

    async def _take_on_all(self, entries: Iterable[QueueEntry]) -> None:
        """Takes entries on concurrently; each goes to the engine as soon as it is ready.

        Returns when all are ready, or when the rest takes long (a chat template may): then it continues beside the next
        read.
        """
        tasks = [self._start(entry) for entry in entries]
        if tasks:
            await asyncio.wait(tasks, timeout=SLOW_S)
        self._raise_failure()

    def _start(self, entry: QueueEntry) -> asyncio.Task[LiveRequest | None]:
        task = asyncio.create_task(self._take_on(entry), name="taking")
        self._requests.taking.add(entry.id)
        task.add_done_callback(lambda _: self._requests.taking.discard(entry.id))
        self._watch(task)
        return task

    def _start_ending(self, entry: QueueEntry) -> asyncio.Task[LiveRequest | None]:
        """Starts ending an entry, which needs no room in the engine."""
        task = asyncio.create_task(self._take_on(entry, only_over=True), name="ending")
        self._requests.ending.add(entry.id)
        task.add_done_callback(lambda _: self._requests.ending.discard(entry.id))
        self._watch(task)
        return task

    def _watch(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._note_done)

    def _note_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)
        self._requests.changed.fire()

    async def _wait_until_taken(self) -> None:
        while self._tasks:
            await self._requests.changed.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failures:
            failures, self._failures = self._failures, []
            raise failures[0]

    @property
    def _spare(self) -> int:
        """Number of further sequences that the engine has batch slots for."""
        return max(0, self._driver.spare - len(self._requests.taking))

    @property
    def _is_interrupted(self) -> bool:
        """Whether something has to be done before anything is taken."""
        return self._is_held_up or self._suspects.next is not None

    @property
    def _is_held_up(self) -> bool:
        return self._stopping.is_set() or self._requests.must_recover

    async def _wait_for_capacity(self) -> None:
        """Waits until the engine has batch slots, or running requests would give way."""
        while not self._is_interrupted:
            self._raise_failure()
            if not self._outbox.is_stuck:
                if self._spare:
                    return
                await self._entries.tell_full()
                if self._handing_back.num_able:
                    return
            await self._requests.changed.wait()

    async def _take_urgent(self) -> None:
        """Takes entries for which running requests give way. It waits for one while no batch slot is free."""
        read = asyncio.create_task(
            self._entries.take_urgent(self._handing_back.num_able, lowest=GIVES_WAY_BELOW), name="taking_urgent"
        )
        try:
            while not read.done() and not (self._spare or self._is_interrupted):
                ends: list[asyncio.Future[Any]] = [read, self._requests.changed.next()]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            with suppress(*retries.REDIS_ERRORS):  # the read ends by itself, or fails too
                if not read.done():
                    await self._entries.wake()
            entries = await asyncio.shield(read)
        finally:
            read.cancel()  # reached before its end only if the worker leaves at once
        if entries:
            self._make_room(len(entries))
        await self._take_on_all(entries)

    def _make_room(self, count: int) -> None:
        self._watch(asyncio.create_task(self._handing_back.make_room(count), name="making_room"))

    async def _recover(self) -> None:
        """Takes on entries that are pending here without being worked on: their read or claim failed half-way."""
        last = "0-0"
        while not self._stopping.is_set():
            known = self._known()  # an entry that leaves the queue meanwhile may still be on the page
            entries = await self._entries.pending(after=last)
            if not entries:
                return
            last = entries[-1].id
            known |= self._known()
            found = [entry for entry in entries if entry.id not in known]
            num_urgent = sum(entry.priority >= GIVES_WAY_BELOW for entry in found)
            if (excess := min(num_urgent - self._spare, self._handing_back.num_able)) > 0:
                self._make_room(excess)  # like for an entry that was read urgently
            await self._take_on_all(found)

    def _known(self) -> set[str]:
        return self._requests.entry_ids | self._outbox.leaving

    async def _run_alone(self, suspect: Parked) -> None:
        """Runs a request that was present at several crashes alone, so that no other suffers."""
        requests, entry, live = self._requests, suspect.entry, None
        requests.alone = entry.id
        try:
            await self._suspects.make_way(suspect)
            await self._wait_until(lambda: self._suspects.is_quiet)
            if self._stopping.is_set() or requests.parked.pop(entry.id, None) is None:
                return
            _log.warning("running_alone", entry=entry.id)
            if (live := await self._take_on(entry, alone=True)) is not None:
                await self._wait_until(lambda: requests.get(live.id) is not live)
        finally:
            requests.alone = None
            self._suspects.note_run(live)

    async def _wait_until(self, holds: Callable[[], bool]) -> None:
        """Waits until `holds`, or `stop`. Meanwhile, pending entries found here end if they may, or wait again."""
        while not (self._stopping.is_set() or holds()):
            if self._failures or self._requests.must_recover or self._heartbeat.is_contested:
                await self._try(self._look_for_own())  # trouble with Redis does not justify running anything beside it
            else:
                await self._requests.changed.wait()

    async def _try(self, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
            self._backoff.reset()
            self._readiness.ready(_PART)
        except (*retries.REDIS_ERRORS, OSError) as error:
            await self._survive(error)

    async def _survive(self, error: Exception) -> None:
        self._requests.must_recover = True
        if is_no_group(error) or is_junk(error):  # junk: in the two keys of the blocking read, which no script checks
            try:
                await self._entries.make_group()
            except (*retries.REDIS_ERRORS, OSError) as refused:
                error = refused
            else:
                if is_no_group(error):
                    return
        self._readiness.lost_redis(_PART, error)
        await pause(self._stopping, self._backoff.next_s())

"""Reads queue entries by size: of an entry over the limit, the worker learns only that, and never gets the body.

Whoever can enqueue can send bodies of half a gigabyte (`proto-max-bulk-len`), as many as they like. So the scripts that
hand entries out check the size first, and a body over the limit stays on the server. Only the blocking read, which no
script can do, may bring one, and it brings one entry at a time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from redis import exceptions

from penstock.protocol import keys, scripts
from penstock.protocol.ranks import LOWEST_PRIORITY
from penstock.protocol.redis import pipeline
from penstock.protocol.redis.connection import Fields, RedisClient
from penstock.protocol.redis.faults import UNREACHABLE
from penstock.protocol.redis.streams import pairs, stream_entries
from penstock.protocol.scripts import Bill
from penstock.protocol.wire import ID_PATTERN, entry_size
from penstock.protocol.wire.requests import AFFINE_CHARS
from penstock.worker.config import WorkerConfig
from penstock.worker.redis.guarded import GUARD, execute_one, make_guarded_group
from penstock.worker.redis.retries import REDIS_ERRORS

BYTES_PER_READ = 8 << 20  # of one answer, and one entry more
LARGEST_ID = f"{2**64 - 1}-{2**64 - 1}"
ENTRIES_PER_READ = 256  # bounds how long one script may hold the server
SWEPT_PER_READ = 64
LATE_S = 0.25  # a blocking read that ends this much late by the server's clock is woken
_PRIORITY = re.compile(rb"-?[0-9]{1,4}")


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """An entry of the request stream."""

    id: str
    fields: Fields  # of an entry over the limit only `id`, and for a call `to`, if present
    size: int  # bytes of all names and values
    is_whole: bool = True  # whether `fields` has all fields
    was_here: bool = False  # whether it was pending for this worker, whose earlier process may have had it

    @property
    def is_deleted(self) -> bool:
        """Whether somebody deleted the entry while it was pending."""
        return self.is_whole and not self.fields

    @property
    def tenant(self) -> str:
        """Tenant of the entry's lane, as in `lanes/places.lua`."""
        text = self.fields.get(b"tenant", b"").decode(errors="replace")
        return text if ID_PATTERN.fullmatch(text) else ""

    @property
    def priority(self) -> int:
        """Priority, as in `lanes/places.lua`."""
        text = self.fields.get(b"priority", b"")
        return int(text) if _PRIORITY.fullmatch(text) else 0

    @property
    def may_be_at_home(self) -> bool:
        """Whether some worker may have precedence, as in `lanes/places.lua`."""
        return b"affinity" in self.fields or any(
            len(self.fields.get(name, b"")) >= AFFINE_CHARS for name in (b"prompt", b"messages")
        )

    @property
    def unbilled(self) -> Bill:
        """Bill for removing the entry without further charge."""
        return Bill(self.id, self.tenant, None)

    @property
    def kept(self) -> Fields:
        """Fields that are worth keeping: all or none."""
        return self.fields if self.is_whole else {}

    @classmethod
    def of(cls, entry_id: str, fields: Fields, max_bytes: int) -> Self:
        """Makes an entry from its fields, without the body if that is over the limit."""
        size = entry_size(fields)
        if size <= max_bytes:
            return cls(entry_id, fields, size)
        return cls(entry_id, {name: fields[name][:256] for name in (b"id", b"to") if name in fields}, size, False)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Answer of `scripts.take`."""

    entries: list[QueueEntry]
    has_more: bool  # whether some new entries still have no place
    left_ms: int | None  # until any worker may take an entry that is now left to some; None: there is none


@dataclass(frozen=True, slots=True)
class Swept:
    """Entries that seem to need no run, and whether there is more to sweep."""

    entries: list[QueueEntry]
    has_more: bool


class EntryReader:
    """Takes entries of one queue for one worker. No read is sent twice.

    Args:
        redis: the client for reads that do not block.
        blocking: the client for those that do.
        config: the worker's.
        kinds: the worker's, as in `scripts.take`.
    """

    def __init__(
        self, redis: RedisClient, blocking: RedisClient, config: WorkerConfig, kinds: tuple[str, str] = ("", "")
    ) -> None:
        self._redis = redis
        self._blocking = blocking
        self._config = config
        self._kinds = kinds
        self._exact_wait_ms = round(config.exact_wait_s * 1000)
        self.on_broken: Callable[[], None] = lambda: None  # a lost answer may have taken entries
        self._has_more = False  # entries without a place in a lane yet
        self._told_room = 0  # spare sequences here, as last told to the other workers
        self._left_ms: int | None = None  # after that time, an entry that is left to other workers may be taken
        self._waking: asyncio.Task[None] | None = None

    async def make_group(self) -> None:
        """Makes the group, also after FLUSHALL or a failover to an empty server. It starts at 0, so that nothing is
        missed.
        """
        await make_guarded_group(self._redis, keys.requests(self._config.queue))
        nudges = keys.nudges(self._config.queue, self._config.name)
        await make_guarded_group(self._redis, nudges)
        await self._redis.pexpire(nudges, round(self._config.heartbeat_ttl_s * 1000))

    async def take(self, count: int, *, waits: bool = True) -> list[QueueEntry]:
        """Takes up to `count` entries that are next. If there are none, it waits briefly for a new one, or not at all.

        Never cancel it: an entry could be left pending here, known to nobody.
        """
        if (taken := await self._take(count)) or not waits:
            return taken
        block_ms = self._config.block_ms
        if self._left_ms is not None:
            block_ms = min(block_ms, self._left_ms)
        return await self._wait_for_one(max(1, block_ms), room=count)

    async def take_urgent(self, count: int, lowest: int) -> list[QueueEntry]:
        """Takes entries like `take` for a full worker, which makes room only for a priority of `lowest` or more.

        `wake` ends the wait.
        """
        if taken := await self._take(count, lowest=lowest, room=0):
            return taken
        return await self._wait_for_one(self._config.block_ms, lowest=lowest, room=0)

    async def wake(self) -> None:
        """Wakes a blocking read, to look again what is next."""
        nudges = keys.nudges(self._config.queue, self._config.name)
        await execute_one(self._redis, ("XADD", nudges, "NOMKSTREAM", "MAXLEN", "=", 1, "*", "look", "again"))

    async def tell_full(self) -> None:
        """Tells the other workers to leave no more entries to this one."""
        if self._told_room:
            await execute_one(self._redis, ("ZADD", keys.room(self._config.queue), 0, self._config.name))
            self._told_room = 0

    async def sweep(self) -> Swept:
        """Gives new entries their places, and takes those that need no run: they are cancelled or too late.

        Returns after `ENTRIES_PER_READ` of them, or all.
        """
        found: list[QueueEntry] = []
        while True:
            entries, has_new, has_more = await self._run(scripts.sweep, SWEPT_PER_READ)
            self._has_more = bool(has_new)
            found += _entries(entries)
            if not (has_new or has_more) or len(found) >= ENTRIES_PER_READ:
                return Swept(found, bool(has_new or has_more))

    async def pending(self, after: str) -> list[QueueEntry]:
        """Returns entries pending for this worker that follow `after`; none when there are no more."""
        if after == LARGEST_ID:  # the server rejects an id after the largest
            return []
        found = _entries(await self._run(scripts.pending, ENTRIES_PER_READ, after=after))
        return [replace(entry, was_here=True) for entry in found]

    async def _take(self, count: int, *, lowest: int = LOWEST_PRIORITY, room: int | None = None) -> list[QueueEntry]:
        while self._has_more:  # all entries must have a place before one is next
            self._has_more = (await self._read_lanes(scripts.take, 0, room=room or count)).has_more
        taken = await self._read_lanes(
            scripts.take,
            count,
            lowest=lowest,
            room=count if room is None else room,
            steal_after_ms=self._config.steal_after_ms,
            kinds=self._kinds,
            exact_wait_ms=self._exact_wait_ms,
        )
        self._has_more, self._left_ms = taken.has_more, taken.left_ms
        self._told_room = max(0, (count if room is None else room) - len(taken.entries))
        return taken.entries

    async def _wait_for_one(self, block_ms: int, *, lowest: int = LOWEST_PRIORITY, room: int) -> list[QueueEntry]:
        """Waits for a new entry that no other worker should have; returns none when it is time to look again what is
        next.
        """
        requests, nudges = keys.requests(self._config.queue), keys.nudges(self._config.queue, self._config.name)
        loop = asyncio.get_running_loop()
        over_s = loop.time() + block_ms / 1000 + LATE_S
        late = loop.call_at(over_s, self._wake_soon)
        try:
            answer = await self._blocking.xreadgroup(
                keys.GROUP, self._config.name, {requests: ">", nudges: ">"}, count=1, block=block_ms
            )
        except UNREACHABLE:
            loop.call_at(over_s, self.on_broken)  # a server that missed the break may still send entries until then
            raise
        finally:
            late.cancel()
        found = []
        for stream, entries in stream_entries(answer):
            if stream == nudges.encode():
                await self._redis.xack(nudges, keys.GROUP, *(entry_id for entry_id, _ in entries))
            else:
                found += [
                    QueueEntry.of(entry_id.decode(), fields, self._config.max_body_bytes)
                    for entry_id, fields in entries
                ]
        return [entry for entry in found if not await self._pass_on(entry, lowest, room)]

    def _wake_soon(self) -> None:
        """Wakes a late read: the server times it by its own clock, which may have been set back."""
        self._waking = asyncio.create_task(self._try_to_wake(), name="wake")

    async def _try_to_wake(self) -> None:
        with suppress(*REDIS_ERRORS):  # the read has its own time limit
            await self.wake()

    async def _pass_on(self, entry: QueueEntry, lowest: int, room: int) -> bool:
        """Passes the entry on if others should have it; returns whether."""
        if room and not entry.may_be_at_home:
            return False
        return bool(
            await execute_one(
                self._redis,
                scripts.pass_on(
                    self._config.queue,
                    worker=self._config.name,
                    entry_id=entry.id,
                    lowest=lowest,
                    room=room,
                    steal_after_ms=self._config.steal_after_ms,
                ),
            )
        )

    async def _read_lanes(self, script: Any, count: int, **more: object) -> _Taken:
        entries, has_more, *rest = await self._run(script, count, **more)
        return _Taken(_entries(entries), bool(has_more), rest[0] if rest else None)

    async def _run(self, script: Any, count: int, **more: object) -> Any:
        command = script(
            self._config.queue,
            worker=self._config.name,
            count=min(count, ENTRIES_PER_READ),
            max_body_bytes=self._config.max_body_bytes,
            max_bytes=BYTES_PER_READ,
            **more,
        )
        try:
            return await pipeline.execute_one(self._redis, command)
        except exceptions.ResponseError as error:
            answer = await GUARD.mend(self._redis, command, error)
            self.on_broken()
            return answer


def _entries(answer: Any) -> list[QueueEntry]:
    return [
        QueueEntry(entry_id.decode(), pairs(fields), size, bool(is_whole))
        for entry_id, size, is_whole, fields in answer
    ]

"""Reads queue entries by their size: of one that is over the limit the worker gets to know that, and not the body.

Whoever can enqueue can send bodies of half a gigabyte (`proto-max-bulk-len`), as many as they like. So the scripts that
hand entries out look first; a body over the limit stays on the server. Only the blocking read, which no script can do,
may bring one, and it brings one at a time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from redis import exceptions

from penstock.producer import keys
from penstock.producer.redis import pipeline
from penstock.producer.redis.connection import Fields, RedisClient
from penstock.producer.redis.faults import UNREACHABLE
from penstock.producer.redis.streams import pairs, stream_entries
from penstock.producer.wire import ID_PATTERN, entry_size
from penstock.worker.config import WorkerConfig
from penstock.worker.protocol import scripts
from penstock.worker.protocol.faults import REDIS_ERRORS
from penstock.worker.protocol.guarded import GUARD, execute_one, make_guarded_group
from penstock.worker.protocol.scripts import Bill

BYTES_PER_READ = 8 << 20  # what one answer brings, and one entry more
LARGEST_ID = f"{2**64 - 1}-{2**64 - 1}"
ENTRIES_PER_READ = 256  # for how long one script may hold the server
SWEPT_PER_READ = 64
LATE_S = 0.25  # after a blocking read should have ended by the server's clock
_PRIORITY = re.compile(rb"-?[0-9]{1,4}")
BEGINNING = 1000  # as in `lanes.lua`: bytes of a prompt that is at home somewhere


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """An entry of the request stream."""

    id: str
    fields: Fields  # of one over the limit only `id`, and `to` of a call, if it has them
    size: int  # bytes of all its names and values
    is_whole: bool = True  # whether `fields` are all

    @property
    def is_deleted(self) -> bool:
        """Somebody deleted it while it was pending."""
        return self.is_whole and not self.fields

    @property
    def tenant(self) -> str:
        """Whose lane it was in, as `lanes.lua` has it."""
        text = self.fields.get(b"tenant", b"").decode(errors="replace")
        return text if ID_PATTERN.fullmatch(text) else ""

    @property
    def priority(self) -> int:
        """As `lanes.lua` has it."""
        text = self.fields.get(b"priority", b"")
        return int(text) if _PRIORITY.fullmatch(text) else 0

    @property
    def may_be_at_home(self) -> bool:
        """Whether some worker is perhaps to have it before others, as `lanes.lua` has it."""
        return b"affinity" in self.fields or any(
            len(self.fields.get(name, b"")) >= BEGINNING for name in (b"prompt", b"messages")
        )

    @property
    def unbilled(self) -> Bill:
        """To let it go when nothing more was done for it."""
        return Bill(self.id, self.tenant, None)

    @property
    def kept(self) -> Fields:
        """The fields as far as they are worth keeping: all or nothing."""
        return self.fields if self.is_whole else {}

    @classmethod
    def of(cls, entry_id: str, fields: Fields, max_bytes: int) -> Self:
        """An entry as it came, without its body if that is over the limit."""
        size = entry_size(fields)
        if size <= max_bytes:
            return cls(entry_id, fields, size)
        return cls(entry_id, {name: fields[name][:256] for name in (b"id", b"to") if name in fields}, size, False)


@dataclass(frozen=True, slots=True)
class _Taken:
    """What `scripts.take` answers."""

    entries: list[QueueEntry]
    has_more: bool  # new ones have no place yet
    left_ms: int | None  # after which one that was left to its home may be taken


@dataclass(frozen=True, slots=True)
class Swept:
    """Entries that need not be run, as it seems, and whether there is more to sweep."""

    entries: list[QueueEntry]
    has_more: bool


class EntryReader:
    """Takes entries of one queue for one worker. No read is sent twice.

    Args:
        redis: for all reads but those that wait.
        blocking: for those.
        config: of the worker.
        digest: of its model; what was set aside for that is taken too.
    """

    def __init__(self, redis: RedisClient, blocking: RedisClient, config: WorkerConfig, digest: str = "") -> None:
        self._redis = redis
        self._blocking = blocking
        self._config = config
        self._digest = digest
        self.on_broken: Callable[[], None] = lambda: None  # a script may have taken entries that no answer brought
        self._has_more = False  # entries that have no place in a lane yet
        self._told_room = 0  # for how many more sequences others believe that there is room here
        self._left_ms: int | None = None  # after which an entry may be taken that was left to another worker
        self._waking: asyncio.Task[None] | None = None

    async def make_group(self) -> None:
        """After FLUSHALL or a failover to an empty server: at 0, so that nothing enqueued since is missed."""
        await make_guarded_group(self._redis, keys.requests(self._config.queue))
        nudges = keys.nudges(self._config.queue, self._config.name)
        await make_guarded_group(self._redis, nudges)
        await self._redis.pexpire(nudges, round(self._config.heartbeat_ttl_s * 1000))

    async def take(self, count: int, *, waits: bool = True) -> list[QueueEntry]:
        """Up to `count` entries whose turn it is. If there are none it waits for a new one, shortly or not at all.

        Never cancel it: the entry would be pending here and known to nobody.
        """
        if (taken := await self._take(count)) or not waits:
            return taken
        block_ms = self._config.block_ms
        if self._left_ms is not None:
            block_ms = min(block_ms, self._left_ms)
        return await self._wait_for_one(max(1, block_ms), room=count)

    async def take_urgent(self, count: int, lowest: int) -> list[QueueEntry]:
        """As `take`, for a worker that has no room but for what it would make room for: a priority of `lowest` or more.

        `wake` ends the wait.
        """
        if taken := await self._take(count, lowest=lowest, room=0):
            return taken
        return await self._wait_for_one(self._config.block_ms, lowest=lowest, room=0)

    async def wake(self) -> None:
        """Has a read that waits look again whose turn it is."""
        nudges = keys.nudges(self._config.queue, self._config.name)
        await execute_one(self._redis, ("XADD", nudges, "NOMKSTREAM", "MAXLEN", "=", 1, "*", "look", "again"))

    async def tell_full(self) -> None:
        """Has nobody leave entries to this worker any more."""
        if self._told_room:
            await execute_one(self._redis, ("ZADD", keys.room(self._config.queue), 0, self._config.name))
            self._told_room = 0

    async def sweep(self) -> Swept:
        """Gives new entries their places, and takes those that need not be run: cancelled, or too late.

        It returns once it has found `ENTRIES_PER_READ`, or all.
        """
        found: list[QueueEntry] = []
        while True:
            entries, has_new, has_more = await self._run(scripts.sweep, SWEPT_PER_READ)
            self._has_more = bool(has_new)
            found += _entries(entries)
            if not (has_new or has_more) or len(found) >= ENTRIES_PER_READ:
                return Swept(found, bool(has_new or has_more))

    async def pending(self, after: str) -> list[QueueEntry]:
        """Entries pending for this worker, from the one that follows `after` on; none when there are no more."""
        if after == LARGEST_ID:  # the server takes what follows it for an error
            return []
        return await self._read(scripts.pending, ENTRIES_PER_READ, after=after)

    async def _take(
        self, count: int, *, lowest: int = scripts.LOWEST_PRIORITY, room: int | None = None
    ) -> list[QueueEntry]:
        while self._has_more:  # all must have a place before one can say whose turn it is
            self._has_more = (await self._read_lanes(scripts.take, 0, room=room or count)).has_more
        taken = await self._read_lanes(
            scripts.take,
            count,
            lowest=lowest,
            room=count if room is None else room,
            steal_after_ms=self._config.steal_after_ms,
            digest=self._digest,
        )
        self._has_more, self._left_ms = taken.has_more, taken.left_ms
        self._told_room = max(0, (count if room is None else room) - len(taken.entries))
        return taken.entries

    async def _wait_for_one(
        self, block_ms: int, *, lowest: int = scripts.LOWEST_PRIORITY, room: int
    ) -> list[QueueEntry]:
        """A new entry, unless another worker should have it; none once it is time to look again whose turn it is."""
        requests, nudges = keys.requests(self._config.queue), keys.nudges(self._config.queue, self._config.name)
        loop = asyncio.get_running_loop()
        over_s = loop.time() + block_ms / 1000 + LATE_S
        late = loop.call_at(over_s, self._wake_soon)
        try:
            answer = await self._blocking.xreadgroup(
                keys.GROUP, self._config.name, {requests: ">", nudges: ">"}, count=1, block=block_ms
            )
        except UNREACHABLE:
            loop.call_at(over_s, self.on_broken)  # until then a server that did not hear of it may go on giving to it
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
        """The server counts for how long a read is blocked by its clock, which may have been set back."""
        self._waking = asyncio.create_task(self._try_to_wake(), name="wake")

    async def _try_to_wake(self) -> None:
        with suppress(*REDIS_ERRORS):  # the read has a time limit of its own
            await self.wake()

    async def _pass_on(self, entry: QueueEntry, lowest: int, room: int) -> bool:
        """Whether the entry waits for others now."""
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

    async def _read(self, script: Any, count: int, **more: str) -> list[QueueEntry]:
        return _entries(await self._run(script, count, **more))

    async def _read_lanes(self, script: Any, count: int, **more: int | str) -> _Taken:
        entries, has_more, *rest = await self._run(script, count, **more)
        return _Taken(_entries(entries), bool(has_more), rest[0] if rest else None)

    async def _run(self, script: Any, count: int, **more: str | int) -> Any:
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

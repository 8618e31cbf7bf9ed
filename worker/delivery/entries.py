"""Reads queue entries by their size: of one that is over the limit the worker gets to know that, and not the body.

Whoever can enqueue can send bodies of half a gigabyte (`proto-max-bulk-len`), as many as they like. So the scripts that
hand entries out look first; a body over the limit stays on the server. Only the blocking read, which no script can do,
may bring one, and it brings one at a time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Self

from penstock.producer import keys
from penstock.producer.redis.connection import Fields, RedisClient, ensure_group
from penstock.producer.redis.pipeline import execute_one
from penstock.producer.redis.streams import pairs, stream_entries
from penstock.producer.wire import ID_PATTERN, entry_size
from penstock.worker.config import WorkerConfig
from penstock.worker.protocol import scripts
from penstock.worker.protocol.scripts import Bill

BYTES_PER_READ = 8 << 20  # what one answer brings, and one entry more
LARGEST_ID = f"{2**64 - 1}-{2**64 - 1}"
ENTRIES_PER_READ = 256  # for how long one script may hold the server
SWEPT_PER_READ = 64
MAX_OVERTAKES = 20  # of the oldest entry that waits, by entries taken in a row: so none waits for good


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


class EntryReader:
    """Takes entries of one queue for one worker, those of dead or draining workers first. No read is sent twice.

    Args:
        redis: for all reads but those that wait.
        blocking: for those.
        config: of the worker.
        digest: of its model; what was set aside for that comes first.
    """

    def __init__(self, redis: RedisClient, blocking: RedisClient, config: WorkerConfig, digest: str = "") -> None:
        self._redis = redis
        self._blocking = blocking
        self._config = config
        self._digest = digest
        self._adopt_at_s = 0.0
        self._has_more = False  # entries that have no place in a lane yet
        self._num_overtakes = 0  # entries taken since the oldest that waited was

    async def make_group(self) -> None:
        """After FLUSHALL or a failover to an empty server: at 0, so that nothing enqueued since is missed."""
        await ensure_group(self._redis, self._config.queue)

    async def take(self, count: int) -> list[QueueEntry]:
        """Up to `count` entries that nobody owns, else those whose turn it is. If there are none it waits for a new
        one, but not for long.

        Never cancel it: the entry would be pending here and known to nobody.
        """
        if adopted := await self._adopt(count):
            return adopted
        if taken := await self._take(count):
            return taken
        return await self._wait_for_one(max(1, round((self._adopt_at_s - time.monotonic()) * 1000)))

    async def sweep(self) -> list[QueueEntry]:
        """Gives new entries their places, and takes those that need not be run: cancelled, or too late."""
        found: list[QueueEntry] = []
        while True:
            entries, self._has_more, _ = await self._read_lanes(scripts.sweep, SWEPT_PER_READ)
            found += entries
            if not self._has_more or len(found) >= ENTRIES_PER_READ:
                return found

    async def pending(self, after: str) -> list[QueueEntry]:
        """Entries pending for this worker, from the one that follows `after` on; none when there are no more."""
        if after == LARGEST_ID:  # the server takes what follows it for an error
            return []
        return await self._read(scripts.pending, ENTRIES_PER_READ, after=after)

    async def _take(self, count: int) -> list[QueueEntry]:
        while self._has_more:  # all must have a place before one can say whose turn it is
            _, self._has_more, _ = await self._read_lanes(scripts.take, 0)
        is_due = self._num_overtakes >= MAX_OVERTAKES
        entries, self._has_more, oldest = await self._read_lanes(scripts.take, count, takes_oldest=is_due)
        is_overtaken = oldest is not None and all(entry.id != oldest for entry in entries)
        self._num_overtakes = self._num_overtakes + len(entries) if is_overtaken else 0
        return entries

    async def _adopt(self, count: int) -> list[QueueEntry]:
        """Entries that nobody owns. While there are any it looks again at once, otherwise every `block_ms`."""
        now_s = time.monotonic()
        if now_s < self._adopt_at_s:
            return []
        entries = await self._read(scripts.adopt, count, digest=self._digest)
        if not entries:
            self._adopt_at_s = now_s + self._config.block_ms / 1000
        return entries

    async def _wait_for_one(self, block_ms: int) -> list[QueueEntry]:
        """Until it is time to look for entries that nobody owns again."""
        answer = await self._blocking.xreadgroup(
            keys.GROUP, self._config.name, {keys.requests(self._config.queue): ">"}, count=1, block=block_ms
        )
        return [
            QueueEntry.of(entry_id.decode(), fields, self._config.max_body_bytes)
            for _, entries in stream_entries(answer)
            for entry_id, fields in entries
        ]

    async def _read(self, script: Any, count: int, **more: str) -> list[QueueEntry]:
        return _entries(await self._run(script, count, **more))

    async def _read_lanes(self, script: Any, count: int, **more: bool) -> tuple[list[QueueEntry], bool, str | None]:
        """Entries, whether more of them are new, and the oldest that waited before, where the script says it."""
        entries, has_more, *oldest = await self._run(script, count, **more)
        return _entries(entries), bool(has_more), oldest[0].decode() if oldest else None

    async def _run(self, script: Any, count: int, **more: str | bool) -> Any:
        command = script(
            self._config.queue,
            worker=self._config.name,
            count=min(count, ENTRIES_PER_READ),
            max_body_bytes=self._config.max_body_bytes,
            max_bytes=BYTES_PER_READ,
            **more,
        )
        return await execute_one(self._redis, command)


def _entries(answer: Any) -> list[QueueEntry]:
    return [
        QueueEntry(entry_id.decode(), pairs(fields), size, bool(is_whole))
        for entry_id, size, is_whole, fields in answer
    ]

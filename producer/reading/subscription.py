"""One reply's entries as they arrive, for the readers of that reply."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

from penstock.producer.reading.entries import Position, decode_fields, entry_id
from penstock.protocol import keys
from penstock.protocol.errors import PenstockError
from penstock.protocol.redis.connection import Fields
from penstock.protocol.redis.faults import may_pass
from penstock.protocol.wire import ReplyEntry

MAX_ARRIVED = 256


class Feed(Protocol):
    """What reads a subscription's stream."""

    def pause(self, subscription: Subscription) -> None: ...

    def resume(self, subscription: Subscription) -> None: ...

    def remove(self, subscription: Subscription) -> None: ...


class Subscription:
    """The entries of one reply, each once and in order.

    Once `MAX_ARRIVED` entries wait, no more are read until half of them are taken: what a slow reader leaves stays in
    Redis.
    """

    def __init__(self, feed: Feed, queue: str, request_id: str, cursor: Position) -> None:
        self.request_id = request_id
        self.key = keys.reply(queue, request_id)
        self.state_key = keys.state(queue, request_id)
        self.seen_key = keys.seen(queue, request_id)
        self.cursor = cursor
        self.furthest = cursor
        self.quiet_since = time.monotonic()
        self.rewound_at: float | None = None
        self._last: Fields | None = None
        self._feed = feed
        self._arrived: deque[tuple[Position, Fields] | PenstockError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_paused = False

    async def next(self) -> tuple[str, ReplyEntry]:
        """Waits for the next entry and its id. Cancelling the wait loses nothing. One task at a time may wait.

        Raises:
            ReplyGone: the reply expired before it was read to its end.
            ReplyCorrupt: the entry does not follow the schema.
            ConnectionLost: Redis stayed away for too long, or the client was closed.
            ServerRefused: Redis does not let this client read the reply.
        """
        while not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._arrived.popleft()
        if self._is_paused and len(self._arrived) <= MAX_ARRIVED // 2:
            self._is_paused = False
            self._feed.resume(self)
        if isinstance(item, PenstockError):
            raise item
        return entry_id(item[0]), decode_fields(self.request_id, item[1])

    @property
    def has_chunk(self) -> bool:
        """Whether the next entry is there and is a chunk."""
        return bool(self._arrived) and isinstance(item := self._arrived[0], tuple) and item[1].get(b"type") == b"chunk"

    @property
    def is_lost(self) -> bool:
        """Whether there is no entry and none to come, because Redis stayed away or refused for too long."""
        return bool(self._arrived) and isinstance(error := self._arrived[0], PenstockError) and may_pass(error)

    def close(self) -> None:
        """Stops following. Harmless when repeated."""
        self._feed.remove(self)

    def deliver(self, where: Position, fields: Fields) -> None:
        if where > self.cursor:
            self.cursor = where
            self.furthest = max(self.furthest, where)
            self.quiet_since = time.monotonic()
            self.rewound_at = None
            self._last = fields
            self._arrive((where, fields))
            if len(self._arrived) >= MAX_ARRIVED and not self._is_paused:
                self._is_paused = True
                self._feed.pause(self)

    def follows(self, entries: list[tuple[bytes, Fields]]) -> bool:
        """Whether `entries`, now at the cursor on the server, are what was read there.

        If so, later entries continue the reply, whatever happened to earlier ones. A claim, and how far the prompt is,
        say nothing of what came before them, so they are never enough.
        """
        if not entries or self._last is None or entries[0][1] != self._last:
            return False
        return self._last.get(b"type") != b"own" and b"prefill_done" not in self._last

    def rewind(self) -> None:
        """Reads the reply from its beginning again; the assembler drops what is known."""
        self.cursor = (0, 0)
        self.rewound_at = time.monotonic()

    def fail(self, error: PenstockError) -> None:
        self._arrive(error)
        self.close()

    def _arrive(self, item: tuple[Position, Fields] | PenstockError) -> None:
        self._arrived.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

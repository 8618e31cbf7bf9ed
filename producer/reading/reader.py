"""Reads all replies of a client over one blocking connection (under Redis Cluster, one per hash slot in use)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

from redis import exceptions

from penstock.producer.reading.entries import position
from penstock.producer.reading.line import Line
from penstock.producer.reading.subscription import Subscription
from penstock.protocol import keys
from penstock.protocol.ids import new_id, slot_of
from penstock.protocol.redis.address import Address
from penstock.protocol.redis.connection import RedisClient, connect_blocking
from penstock.protocol.redis.faults import UNREACHABLE
from penstock.protocol.redis.moves import BLOCK_S
from penstock.protocol.redis.pipeline import Batcher

log = logging.getLogger(__name__)

Hear: TypeAlias = Callable[[int, Exception | None], object]


class ReplyReader:
    """Follows any number of replies; each `Subscription` gets its own entries from its own position.

    One XREAD over all followed streams blocks at the server. When a stream joins the set meanwhile, the client appends
    to its own wake-up stream, which the XREAD reads as well. The XREAD then returns at once and is repeated with the
    longer list. An XREAD without a group changes nothing on the server, so it may be lost, repeated or abandoned.

    When the connection fails, reading resumes after the last entry seen of each stream, with jittered backoff. Waiting
    subscriptions fail, with `ConnectionLost`, only when Redis stayed away for `give_up_after_s`.

    Attributes:
        hear: gets the hash slot (0 without a cluster) and each error of an outage, and None once it is over.
    """

    def __init__(self, address: Address, commands: RedisClient, batcher: Batcher, *, give_up_after_s: float) -> None:
        self._address = address
        self._commands = commands
        self._batcher = batcher
        self._give_up_after_s = give_up_after_s
        self.redis = connect_blocking(address, decode=False, block_s=BLOCK_S, name="penstock-reader")
        self._lines: dict[int, Line] = {}
        self.hear: Hear = _OutageLog(address)

    def follow(self, queue: str, request_id: str, after: str = "0-0") -> Subscription:
        """Starts reading the reply from the entry that follows `after`. Needs a running event loop."""
        slot = slot_of(request_id) if self._address.kind == "cluster" else 0
        line = self._lines.get(slot)
        if line is None:
            wake_key = keys.wake(new_id(slot if self._address.kind == "cluster" else None))
            line = Line(
                self._address,
                self.redis,
                self._commands,
                self._batcher,
                wake_key,
                self._give_up_after_s,
                hear=lambda error: self.hear(slot, error),
            )
            self._lines[slot] = line
        subscription = Subscription(line, queue, request_id, position(after))
        line.add(subscription)
        return subscription

    async def close(self) -> None:
        """Stops reading; subscriptions that wait fail with ConnectionLost."""
        for line in self._lines.values():
            await line.close()
        self._lines.clear()
        await self.redis.aclose()


class _OutageLog:
    """Logs one line for each outage, with a traceback if Redis is not the cause."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lost: set[int] = set()

    def __call__(self, slot: int, error: Exception | None) -> None:
        if error is None:
            self._lost.discard(slot)
        elif slot not in self._lost:
            self._lost.add(slot)
            unexpected = not isinstance(error, (exceptions.RedisError, *UNREACHABLE))
            log.warning("reading replies from %s failed: %s", self._address, error, exc_info=unexpected and error)

"""Status of a queue: whether any worker serves it, what it serves, and how many requests are in it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from redis import exceptions

from penstock.protocol import keys
from penstock.protocol.queue.enqueue import Execute
from penstock.protocol.redis.faults import UNREACHABLE
from penstock.protocol.redis.streams import pairs
from penstock.protocol.tasks import end_tasks
from penstock.protocol.wire import ID_PATTERN, ModelCard, decode_card

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Status of a queue now.

    Attributes:
        is_served: whether a worker takes its requests. A worker that died counts until its heartbeat lapses; one that
            loads its model or drains does not.
        num_requests: number of requests that wait or run, which `max_queue_length` limits. While nobody serves the
            queue, all of them wait.
    """

    is_served: bool
    num_requests: int


async def query_status(execute: Execute, queue: str) -> QueueStatus:
    """Asks the server for a queue's status.

    Raises:
        RedisError, OSError: it can't be reached, or refuses.
    """
    is_served, num_requests = await asyncio.gather(
        execute("EXISTS", keys.serving(queue)), execute("XLEN", keys.requests(queue))
    )
    return QueueStatus(bool(is_served), int(num_requests))


async def query_card(execute: Execute, queue: str) -> ModelCard | None:
    """Returns what the workers of `queue` serve; None: there are none.

    Raises:
        RedisError, OSError: the server can't be reached, or refuses.
        ValueError: something else is there.
    """
    answer = await execute("HGETALL", keys.card(queue))
    fields = answer if isinstance(answer, Mapping) else pairs(answer)  # as one command and as one of a pipeline
    return decode_card(fields) if fields else None


async def query_queues(execute: Execute) -> tuple[str, ...]:
    """Returns the names of the queues that are served.

    Raises:
        RedisError, OSError: the server can't be reached, or refuses.
    """
    found = [name.decode(errors="replace") for name in await execute("ZRANGE", keys.queues(), 0, -1)]
    return tuple(sorted(name for name in found if ID_PATTERN.fullmatch(name)))


class ServedWatch:
    """Logs a warning when requests are sent to a queue that nobody serves: once, until it is served again.

    It runs in the background and asks at most once per `LOOK_INTERVAL_S`, however many requests are sent.
    """

    def __init__(self, execute: Execute, queue: str) -> None:
        self._execute = execute
        self._queue = queue
        self._is_served = True
        self._looked_at_s = -LOOK_INTERVAL_S
        self._look: asyncio.Task[None] | None = None

    def note_sent(self) -> None:
        """Notes that a request was sent."""
        now_s = time.monotonic()
        if now_s - self._looked_at_s >= LOOK_INTERVAL_S and self.is_idle:
            self._looked_at_s = now_s
            self._look = asyncio.create_task(self._look_once())

    @property
    def is_idle(self) -> bool:
        return self._look is None or self._look.done()

    async def close(self) -> None:
        if self._look is not None:
            await end_tasks([self._look])

    async def _look_once(self) -> None:
        try:
            is_served = bool(await self._execute("EXISTS", keys.serving(self._queue)))
        except (exceptions.RedisError, *UNREACHABLE) as error:
            log.debug("whether queue %r is served is not known: %s", self._queue, error)
            return
        if self._is_served and not is_served:
            log.warning("no worker serves queue %r; its requests wait for one", self._queue)
        self._is_served = is_served

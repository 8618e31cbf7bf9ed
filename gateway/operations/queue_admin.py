"""Operations on queues in one gateway process: a connection to Redis as an operator, and the last snapshots."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from redis import exceptions

from penstock.gateway.errors import RETRY_AFTER_S, ApiError
from penstock.gateway.metrics import FORGET_AFTER_S
from penstock.gateway.store.connection import Store
from penstock.protocol.operations import dead_letters
from penstock.protocol.operations.collector import look
from penstock.protocol.operations.draining import UnknownWorker, tell_to_drain
from penstock.protocol.operations.snapshot import Snapshot
from penstock.protocol.queue.cancelling import cancel
from penstock.protocol.queue.status import query_queues
from penstock.protocol.redis.faults import is_not_permitted
from penstock.protocol.tasks import Joined

T = TypeVar("T")

MAX_AGE_S = 0.4
"""Shortest time between two looks at a queue, however many pages watch it."""

MAX_QUEUES = 256
"""Number of queues that a process remembers; others can still be looked at."""


@dataclass(slots=True)
class _Looked:
    joined: Joined[Snapshot]
    last: Snapshot | None = None
    at_s: float = 0.0  # on the process's clock


class QueueAdmin:
    """Looks at queues and acts on them.

    Args:
        store: a connection whose user has the role `operator`.
        queues: those that are served here; empty: all.
    """

    def __init__(self, store: Store, queues: tuple[str, ...]) -> None:
        self._store = store
        self._only = queues
        self._known: dict[str, float] = {}  # when each was last served
        self._looked: OrderedDict[str, _Looked] = OrderedDict()

    async def queues(self) -> tuple[str, ...]:
        """Returns the queues that are configured or served, or were within `FORGET_AFTER_S`, by name.

        Raises:
            ApiError: this process may not look.
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        if not self._only:
            async with self._store.answered():
                found = await _allowed(query_queues(self._store.redis.execute_command))
            self._note(found)
        return tuple(sorted({*self._only, *self._known}))

    def _note(self, served: Iterable[str]) -> None:
        """Notes served queues. Those that are gone are dropped, and the oldest if there are too many."""
        now_s = time.monotonic()
        for queue in served:
            self._known.pop(queue, None)
            self._known[queue] = now_s
        for queue in list(self._known):
            if now_s - self._known[queue] >= FORGET_AFTER_S or len(self._known) > MAX_QUEUES:
                del self._known[queue]

    def serves(self, queue: str) -> bool:
        return not self._only or queue in self._only

    async def look(self, queue: str) -> Snapshot:
        """Returns a queue's snapshot, at most a moment old. Raises as `queues`."""
        looked = self._looked.get(queue)
        if looked is None:
            looked = self._looked[queue] = _Looked(Joined(lambda: self._take_look(queue)))
        self._looked.move_to_end(queue)
        while len(self._looked) > MAX_QUEUES:
            self._looked.popitem(last=False)
        if looked.last is not None and time.monotonic() - looked.at_s < MAX_AGE_S:
            return looked.last
        asked_at_s = time.monotonic()
        looked.last = await looked.joined.run()
        looked.at_s = asked_at_s
        return looked.last

    async def _take_look(self, queue: str) -> Snapshot:
        async with self._store.answered():
            return await _allowed(look(self._store.redis, queue))

    async def drain(self, queue: str, worker: str) -> None:
        """Drains a worker. Raises ApiError if no worker of this name lives (404), and as `queues`."""
        async with self._store.answered():
            try:
                await _allowed(tell_to_drain(self._store.redis, queue, worker))
            except UnknownWorker as error:
                raise ApiError(404, str(error), param="worker", code="not_found") from None

    async def cancel(self, queue: str, request_id: str) -> None:
        """Cancels a request. Raises as `queues`."""
        async with self._store.answered():
            await _allowed(cancel(self._store.redis, queue, request_id))

    async def replay(self, queue: str, letter_id: str) -> str:
        """Replays a dead letter, and returns the new id of its request.

        Raises:
            ApiError: there is no such letter (404), it holds no request (409), or as `queues`.
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        async with self._store.answered():
            redis = self._store.redis
            found = await _allowed(dead_letters.find_letters(redis, queue, letter_id))
            try:
                new_id = await _allowed(dead_letters.replay(redis, queue, found[0])) if found else None
            except dead_letters.NotReplayable as error:
                raise ApiError(409, str(error), param="letter", code="not_replayable") from None
        if new_id is None:
            message = f"queue {queue!r} has no dead letter {letter_id!r}"
            raise ApiError(404, message, param="letter", code="not_found")
        return new_id


async def _allowed(work: Awaitable[T]) -> T:
    """Returns the result of `work`; if the Redis user lacks the permission, the error tells the operator what to do.

    Raises:
        ApiError: the permission is missing (503).
    """
    try:
        return await work
    except exceptions.ResponseError as error:
        if not is_not_permitted(error):
            raise
        message = (
            "this gateway's Redis user may not look after queues: set operator_redis_url to a user with the role "
            "operator (deploy/redis/users.acl)"
        )
        raise ApiError(503, message, type="server_error", code="not_an_operator", retry_after_s=RETRY_AFTER_S) from None

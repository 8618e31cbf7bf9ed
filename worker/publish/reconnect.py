"""Checks whether the server still has what this worker wrote.

After a failover to a lagging replica it may not: the last chunks of a reply may be missing there, or the claim, or an
acknowledgement. Appending as if nothing had happened would leave a gap in the reply that nothing can fill later.

So after each new connection, which may lead to another server, the worker checks each running request: the end of its
reply must match what was confirmed, and its owner must be this process. A request whose reply or claim was lost is let
go, to be claimed and continued from what is left. Sampling gives the same tokens again; readers drop those they have by
their offset.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from redis import exceptions
from redis.asyncio import Redis

from penstock.protocol import scripts
from penstock.protocol.redis.clients import is_looking_up
from penstock.protocol.redis.connection import RedisClient, on_new_connections
from penstock.protocol.redis.pipeline import execute
from penstock.protocol.scripts import ClaimState
from penstock.worker.publish.outbox import Drop, Fence
from penstock.worker.redis import retries
from penstock.worker.run.requests import LiveRequest, RequestTable

_look: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("_look", default=None)


class Reconnects:
    """Counts new connections, which may lead to another server, also those that the Redis library makes unasked.

    Args:
        redis: the client whose connections are counted.
        on_change: called after each.
    """

    def __init__(self, redis: RedisClient, on_change: Callable[[], None]) -> None:
        self._redis = redis
        self.count = 0
        self._num_checked = 0
        self._on_change = on_change
        self._connects_while_sending = not isinstance(redis, Redis)
        on_new_connections(redis, self._connected)

    @property
    def is_checked(self) -> bool:
        """Whether the server of the newest connection was checked."""
        return self._num_checked == self.count

    async def prepare(self) -> None:
        """Makes a cluster client update its topology now, if due: connections made for that can be counted."""
        if self._connects_while_sending:
            await self._redis.initialize()

    def note(self) -> None:
        self.count += 1
        self._on_change()

    def note_checked(self, count: int) -> None:
        """Notes a check; `count` is from before it."""
        self._num_checked = count

    @contextmanager
    def looking(self, look: Callable[[], Awaitable[None]]) -> Iterator[None]:
        """Calls `look` before anything is sent over a connection that a cluster client makes within the block.

        Such a client connects while it sends, too late to count the connection. If `look` raises a ConnectionError,
        nothing is sent over that connection.
        """
        token = _look.set(look if self._connects_while_sending else None)
        try:
            yield
        finally:
            _look.reset(token)

    async def _connected(self) -> None:
        self.note()
        look = _look.get()
        if look is not None:
            if is_looking_up():  # `look` would need the lookup that is under way
                raise exceptions.ConnectionError("the cluster's topology has changed: nothing was sent")
            token = _look.set(None)  # `look` needs connections too
            try:
                await look()
            finally:
                _look.reset(token)


async def look_back(redis: RedisClient, requests: RequestTable) -> list[Drop | Fence]:
    """Finds the requests that the server does not have as this worker left them.

    Raises:
        RedisError, OSError: the connection failed.
    """
    lives = list(requests)
    if not lives:
        return []
    answers = await execute(redis, [scripts.newest(live.queue, live.id) for live in lives])
    for error in answers:
        if isinstance(error, Exception) and retries.must_wait(error):
            raise error
    found = [
        judge(live, scripts.parse_standing(answer))
        for live, answer in zip(lives, answers, strict=True)
        if not isinstance(answer, Exception)  # their own writes will get the same error
    ]
    return [verdict for verdict in found if verdict is not None]


def judge(live: LiveRequest, newest: ClaimState) -> Drop | Fence | None:
    """Compares a running request with the server's state (`scripts.newest`), and returns what follows for its owner."""
    if newest.entry_id is None:
        return Drop(live, "gone")
    if not newest.is_of(live.claim):
        return Drop(live, "rolled_back") if newest.owner is None else Fence(live)
    epoch, number = map(int, newest.entry_id.split("-"))
    if epoch > live.claim.epoch:
        return Fence(live)
    return Drop(live, "rolled_back") if (epoch, number) < (live.claim.epoch, live.reply.last_number) else None

"""Whether the server still remembers what this worker wrote.

After a failover to a replica that lagged it does not: the last chunks of a reply may be missing there, or the claim, or
an acknowledgement. Appending on as if nothing had happened would leave a gap in the reply that nothing can fill later.
So whenever a connection is made anew, which may lead to another server than the last one, the end of each running reply
is compared with what was confirmed, and the owner with this process: a request whose reply or claim was lost is let go
of, to be claimed and continued from what is left. Sampling gives the same tokens again; readers drop those they have
by their offset.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from redis import exceptions
from redis.asyncio import Redis

from penstock.producer.redis.clients import is_looking_up
from penstock.producer.redis.connection import RedisClient, on_new_connections
from penstock.producer.redis.pipeline import execute
from penstock.worker.delivery.outbox import Drop, Fence
from penstock.worker.delivery.requests import LiveRequest, RequestTable
from penstock.worker.protocol import faults, scripts
from penstock.worker.protocol.scripts import Standing

_look: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("_look", default=None)


class Reconnects:
    """Counts what may have led to another server: each new connection, also one that the Redis library makes unasked.

    Args:
        redis: whose connections.
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
        """Whether the server of the newest connection is known to have what was written."""
        return self._num_checked == self.count

    async def prepare(self) -> None:
        """Has a cluster client look at the topology now, if it has to: what it connects for that can be counted."""
        if self._connects_while_sending:
            await self._redis.initialize()

    def note(self) -> None:
        self.count += 1
        self._on_change()

    def note_checked(self, count: int) -> None:
        """The server was asked; `count` is from before."""
        self._num_checked = count

    @contextmanager
    def looking(self, look: Callable[[], Awaitable[None]]) -> Iterator[None]:
        """Has `look` called before anything is sent over a connection that a cluster client makes within the block.

        It makes them while it sends, when nobody can count them any more. If `look` raises a ConnectionError, nothing
        is sent over that connection.
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
            if is_looking_up():  # what `look` would ask waits until that is over
                raise exceptions.ConnectionError("the cluster's topology has changed: nothing was sent")
            token = _look.set(None)  # it needs connections too
            try:
                await look()
            finally:
                _look.reset(token)


async def look_back(redis: RedisClient, requests: RequestTable) -> list[Drop | Fence]:
    """Which requests the server does not have as this worker left them.

    Raises:
        RedisError, OSError: the connection failed.
    """
    lives = list(requests)
    if not lives:
        return []
    answers = await execute(redis, [scripts.newest(live.queue, live.id) for live in lives])
    for error in answers:
        if isinstance(error, Exception) and faults.must_wait(error):
            raise error
    found = [
        judge(live, scripts.parse_standing(answer))
        for live, answer in zip(lives, answers, strict=True)
        if not isinstance(answer, Exception)  # its own writes will meet the same
    ]
    return [verdict for verdict in found if verdict is not None]


def judge(live: LiveRequest, newest: Standing) -> Drop | Fence | None:
    """What the server says of a running request (`scripts.newest`), and what it means for the one who has it."""
    if newest.entry_id is None:
        return Drop(live, "gone")
    if not newest.is_of(live.claim):
        return Drop(live, "rolled_back") if newest.owner is None else Fence(live)
    epoch, number = map(int, newest.entry_id.split("-"))
    if epoch > live.claim.epoch:
        return Fence(live)
    return Drop(live, "rolled_back") if (epoch, number) < (live.claim.epoch, live.reply.last_number) else None

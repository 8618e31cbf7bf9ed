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
from typing import Literal

from redis.asyncio import Redis

from penstock.producer.redis.connection import RedisClient, on_new_connections
from penstock.worker.delivery.requests import LiveRequest
from penstock.worker.protocol.scripts import Standing

Verdict = Literal["kept", "fenced", "gone", "rolled_back"]

_look: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("_look", default=None)


class Reconnects:
    """Counts what may have led to another server: each new connection, also one that the Redis library makes unasked.

    Args:
        redis: whose connections.
        on_change: called after each.
    """

    def __init__(self, redis: RedisClient, on_change: Callable[[], None]) -> None:
        self.count = 0
        self._on_change = on_change
        self._connects_while_sending = not isinstance(redis, Redis)
        on_new_connections(redis, self._connected)

    def note(self) -> None:
        self.count += 1
        self._on_change()

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
            token = _look.set(None)  # it needs connections too
            try:
                await look()
            finally:
                _look.reset(token)


def judge(live: LiveRequest, newest: Standing) -> Verdict:
    """What the server says of a running request (`scripts.newest`), and what it means for the one who has it."""
    if newest.entry_id is None:
        return "gone"
    if not newest.is_of(live.claim):
        return "rolled_back" if newest.owner is None else "fenced"
    epoch, number = map(int, newest.entry_id.split("-"))
    if epoch > live.claim.epoch:
        return "fenced"
    return "rolled_back" if (epoch, number) < (live.claim.epoch, live.last_number) else "kept"

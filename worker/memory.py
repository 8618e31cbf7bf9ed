"""Whether the server still remembers what this worker wrote.

After a failover to a replica that lagged it does not: the last chunks of a reply may be missing there, or the claim, or
an acknowledgement. Appending on as if nothing had happened would leave a gap in the reply that nothing can fill later.
So whenever a connection is made anew, which may lead to another server than the last one, the end of each running reply
is compared with what was confirmed, and a request whose reply lost entries is let go of, to be claimed and continued
from what is left. Sampling gives the same tokens again; readers drop those they have by their offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from redis.asyncio import Redis

from penstock.producer.connection import RedisClient
from penstock.producer.pipeline import Command
from penstock.worker.live import LiveRequest

Verdict = Literal["kept", "fenced", "gone", "rolled_back"]


class Reconnects:
    """Counts what may have led to another server.

    Args:
        redis: on a single server (or one found by Sentinel) each new connection counts, a silent one too. A cluster
            client has no such hook; there whoever sees a connection fail calls `note`.
        on_change: called after each.
    """

    def __init__(self, redis: RedisClient, on_change: Callable[[], None]) -> None:
        self.count = 0
        self._on_change = on_change
        if isinstance(redis, Redis):
            redis.connection_pool.connection_kwargs["redis_connect_func"] = self._connected

    def note(self) -> None:
        self.count += 1
        self._on_change()

    async def _connected(self, connection: Any) -> None:
        await connection.on_connect()
        self.note()


def last_entry(live: LiveRequest) -> Command:
    """Reads the last entry of a running reply, for `judge`."""
    return ("XREVRANGE", live.reply_key, "+", "-", "COUNT", 1)


def judge(live: LiveRequest, entries: Iterable[Any]) -> Verdict:
    """What the answer to `last_entry` means for the request's owner."""
    for entry_id, _ in entries:
        epoch, number = map(int, entry_id.decode().split("-"))
        if epoch > live.claim.epoch:
            return "fenced"
        return "rolled_back" if (epoch, number) < (live.claim.epoch, live.last_number) else "kept"
    return "gone"

"""Tells a worker to drain, and sees whether it has gone."""

from __future__ import annotations

from typing import Literal, cast

from penstock.protocol import keys
from penstock.protocol.operations.collector import look
from penstock.protocol.redis.connection import RedisClient

DRAIN_MARK_TTL_S = 86_400
"""Longer than a drain takes. A leftover mark is harmless: it names a process, not a worker."""

Presence = Literal["there", "left", "lost"]
"""`left`: it shut down properly. `lost`: it died or froze and its heartbeat expired; other workers take its requests.
"""


class UnknownWorker(LookupError):
    """No live worker of the queue has this name; the message lists the live ones."""


async def tell_to_drain(redis: RedisClient, queue: str, worker: str) -> bytes:
    """Marks a worker to drain, which it sees at its next heartbeat; returns what identifies its process.

    Raises:
        UnknownWorker: no worker of this name lives.
    """
    instance = cast("bytes | None", await redis.get(keys.heartbeat(queue, worker)))
    if instance is None:
        live = [each.name for each in (await look(redis, queue)).workers if each.is_live]
        raise UnknownWorker(f"queue {queue!r} has no live worker {worker!r}; live: {', '.join(live) or 'none'}")
    await redis.set(keys.drain(queue, worker), instance, ex=DRAIN_MARK_TTL_S)
    return instance


async def presence(redis: RedisClient, queue: str, worker: str, instance: bytes) -> Presence:
    """Returns whether the process that `tell_to_drain` marked is still there, and if not, how it went."""
    pipeline = redis.pipeline(transaction=False)
    pipeline.get(keys.heartbeat(queue, worker))
    pipeline.get(keys.drain(queue, worker))
    beating, marked = await pipeline.execute()
    if beating == instance:
        return "there"
    return "lost" if marked == instance else "left"

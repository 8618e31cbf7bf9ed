"""The workers of a queue as Redis knows them, and how to tell one of them to drain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

from redis import exceptions

from penstock.producer import keys
from penstock.producer.redis.connection import RedisClient
from penstock.worker.protocol.consumers import is_worker

DRAIN_MARK_TTL_S = 86_400
"""Longer than a drain takes. A mark that is left over harms nobody: it names a process, not a worker."""

Presence = Literal["there", "left", "lost"]
"""`left`: it said goodbye. `lost`: it died or froze, and its heartbeat expired; other workers take its requests."""


class UnknownWorker(LookupError):
    """No live worker of the queue has this name; the message lists those that there are."""


@dataclass(frozen=True, slots=True)
class Member:
    """One consumer of a queue's group."""

    name: str
    num_taken: int  # requests it has taken and not finished
    heartbeat_left_ms: int | None  # until others take over, unless it beats again; None: it has no heartbeat
    is_draining: bool
    digest: str | None = None  # of its model

    @property
    def is_live(self) -> bool:
        return self.heartbeat_left_ms is not None


async def members(redis: RedisClient, queue: str) -> list[Member]:
    """The workers of `queue` by name, with dead ones not cleared away yet; for a client that does not decode."""
    try:
        consumers: Any = await redis.xinfo_consumers(keys.requests(queue), keys.GROUP)
    except exceptions.ResponseError as error:
        if "NOGROUP" in str(error) or "no such key" in str(error):
            return []
        raise
    pipeline = redis.pipeline(transaction=False)
    consumers = [consumer for consumer in consumers if is_worker(consumer["name"].decode())]
    names = [consumer["name"].decode() for consumer in consumers]
    pipeline.hgetall(keys.digests(queue))
    for name in names:
        pipeline.pttl(keys.heartbeat(queue, name))
        pipeline.get(keys.heartbeat(queue, name))
        pipeline.get(keys.drain(queue, name))
    digests, *answers = await pipeline.execute()
    found = [
        Member(
            name,
            num_taken=int(consumer["pending"]),
            heartbeat_left_ms=left_ms if instance is not None else None,
            is_draining=instance is not None and marked == instance,
            digest=digest.decode() if (digest := digests.get(name.encode())) else None,
        )
        for name, consumer, left_ms, instance, marked in zip(
            names, consumers, answers[::3], answers[1::3], answers[2::3], strict=True
        )
    ]
    return sorted(found, key=lambda member: member.name)


async def backlog(redis: RedisClient, queue: str, found: Iterable[Member]) -> int:
    """Requests of `queue` that none of the workers `found` has: nobody took them yet, or they were given back."""
    num_requests = int(await redis.xlen(keys.requests(queue)))
    return max(0, num_requests - sum(member.num_taken for member in found))


async def tell_to_drain(redis: RedisClient, queue: str, worker: str) -> bytes:
    """Marks a worker to be drained, which it sees with its next heartbeat; returns what names its process.

    Raises:
        UnknownWorker: no worker of this name lives.
    """
    instance = cast("bytes | None", await redis.get(keys.heartbeat(queue, worker)))
    if instance is None:
        live = [member.name for member in await members(redis, queue) if member.is_live]
        raise UnknownWorker(f"queue {queue!r} has no live worker {worker!r}; live: {', '.join(live) or 'none'}")
    await redis.set(keys.drain(queue, worker), instance, ex=DRAIN_MARK_TTL_S)
    return instance


async def presence(redis: RedisClient, queue: str, worker: str, instance: bytes) -> Presence:
    """Whether the process that `tell_to_drain` marked is still there, and if not, how it went."""
    pipeline = redis.pipeline(transaction=False)
    pipeline.get(keys.heartbeat(queue, worker))
    pipeline.get(keys.drain(queue, worker))
    beating, marked = await pipeline.execute()
    if beating == instance:
        return "there"
    return "lost" if marked == instance else "left"

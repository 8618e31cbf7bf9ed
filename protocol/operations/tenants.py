"""The tenants of a queue: their waiting requests, what they have been served, and the weights set by operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.protocol import keys
from penstock.protocol.queue.load import priorities
from penstock.protocol.redis.connection import RedisClient

FLOOR = b"/floor"  # a field of the hash of weights that is not a tenant
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant that waits, or has a weight."""

    name: str  # "": requests without a tenant
    num_waiting: int
    priority: int | None  # of its next request; None: it does not wait
    served: float  # tokens over its weight: the least served is next. 0 if no longer known
    weight: float


async def tenants(redis: RedisClient, queue: str) -> list[Tenant]:
    """Returns the tenants by name; for a client that does not decode. Entries without a place yet are not counted."""
    texts: Any = await redis.hgetall(keys.weights(queue))
    weights: dict[bytes, float] = {name: _weight(text) for name, text in texts.items() if name != FLOOR}
    served: dict[bytes, tuple[int | None, float]] = dict.fromkeys(weights, (None, 0.0))
    idle: Any = await redis.zrange(keys.service(queue), 0, -1, withscores=True)
    served |= {name: (None, tokens) for name, tokens in idle if name in weights}
    found: Any = await redis.zrange(keys.bands(queue), 0, -1)
    for priority in priorities(found):
        waiting: Any = await redis.zrange(keys.band(queue, priority), 0, -1, withscores=True)
        served |= {name: (priority, tokens) for name, tokens in waiting}
    pipeline = redis.pipeline(transaction=False)
    for name in served:
        pipeline.zcard(keys.lane(queue, name.decode(errors="replace")))
    counts = await pipeline.execute()
    return sorted(
        (
            Tenant(name.decode(errors="replace"), int(count), priority, tokens, weights.get(name, 1.0))
            for (name, (priority, tokens)), count in zip(served.items(), counts, strict=True)
        ),
        key=lambda tenant: tenant.name,
    )


async def set_weight(redis: RedisClient, queue: str, tenant: str, weight: float) -> None:
    """Sets a tenant's weight from now on. Of two tenants that wait, one with twice the weight is served twice as much.

    Raises:
        ValueError: out of range.
    """
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"a weight is {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, not {weight:g}")
    if weight == 1.0:
        await redis.hdel(keys.weights(queue), tenant)
    else:
        await redis.hset(keys.weights(queue), tenant, repr(weight))


def _weight(text: bytes) -> float:
    """Parses a weight like the server's scripts (`shared/weights.lua`)."""
    try:
        weight = float(text)
    except ValueError:
        return 1.0
    return weight if 0 < weight < float("inf") else 1.0

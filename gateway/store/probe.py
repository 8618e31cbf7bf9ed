"""A write that changes nothing, to see whether Redis takes any."""

from __future__ import annotations

import asyncio

from redis.asyncio import RedisCluster

from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.protocol import lua
from penstock.protocol.ids import NUM_SLOTS, id_in_slot

LIVES_MS = 1000
_NAME = "probe"
_TRIED_SLOTS = range(0, NUM_SLOTS, NUM_SLOTS // 128)
_PROBE = lua.load("penstock.gateway.store", "probe")


async def probe(store: Store) -> None:
    """Writes by a script, on each primary of a cluster that has more than about a hundredth of the slots.

    Raises:
        ConnectionLost, ServerRefused: Redis is away or refuses.
    """
    await asyncio.gather(*(store.execute(*lua.call(_PROBE, [key], [LIVES_MS])) for key in await _keys(store)))


async def _keys(store: Store) -> list[str]:
    redis = store.redis
    if not isinstance(redis, RedisCluster):
        return [names.probe(_NAME)]
    async with store.answered():
        await redis.initialize()
        keys = (names.probe(id_in_slot(_NAME, slot)) for slot in _TRIED_SLOTS)
        by_node = {redis.get_node_from_key(key): key for key in keys}
    return list(by_node.values())

"""Lists waiting requests in about the order of their turn, by lane and by tenant. It reads no body."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.protocol import keys
from penstock.protocol.operations.dead_letters import server_ms
from penstock.protocol.queue.load import priorities
from penstock.protocol.ranks import priority_of
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.pipeline import Command, execute
from penstock.protocol.redis.streams import pairs

_MEMBER = re.compile(rb".(\d+)-(\d+)/(\d+)/\d*")
"""A member of a lane, as `lanes/places.lua` makes it: number, ms, bytes, slot."""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """An entry of a lane."""

    entry: str  # id of the queue entry, and of the request if it named no id
    tenant: str  # "": it named none
    priority: int
    num_bytes: int
    age_s: float  # since its enqueue


async def next_to_run(redis: RedisClient, queue: str, *, limit: int, tenant: str | None = None) -> list[WaitingRequest]:
    """Returns up to `limit` entries of lanes: the highest priority first, then the least served tenant, then what is
    due first. Tenants' turns alternate as they are served, which is not predicted.

    Args:
        redis: a client that does not decode.
        queue: the queue's name.
        limit: most entries to return.
        tenant: whose entries to list; None: all tenants'.

    Raises:
        RedisError, OSError: the server can't be reached, or refuses.
    """
    now_ms = await server_ms(redis, queue)
    if tenant is not None:
        return (await _list_tenants(redis, queue, [tenant], limit, now_ms))[:limit]
    found: list[WaitingRequest] = []
    found_bands: Any = await redis.zrange(keys.bands(queue), 0, -1)
    for priority in sorted(priorities(found_bands), reverse=True):
        names: Any = await redis.zrange(keys.band(queue, priority), 0, limit - 1)
        found += await _list_tenants(redis, queue, [name.decode(errors="replace") for name in names], limit, now_ms)
        found.sort(key=lambda each: -each.priority)  # a tenant may have lower ones behind
        if sum(each.priority >= priority for each in found) >= limit:
            break
    return found[:limit]


async def _list_tenants(
    redis: RedisClient, queue: str, tenants: Sequence[str], limit: int, now_ms: int
) -> list[WaitingRequest]:
    if not tenants:
        return []
    ranges: list[Command] = [("ZRANGE", keys.lane(queue, name), 0, limit - 1, "WITHSCORES") for name in tenants]
    found = []
    for name, answer in zip(tenants, await execute(redis, ranges), strict=True):
        if isinstance(answer, Exception):
            raise answer
        found += [_read(member, float(rank), name, now_ms) for member, rank in pairs(answer).items()]
    return [each for each in found if each is not None]


def _read(member: bytes, rank: float, tenant: str, now_ms: int) -> WaitingRequest | None:
    match = _MEMBER.fullmatch(member)
    if match is None:
        return None  # not written by Penstock
    number, ms, size = (int(part) for part in match.groups())
    if not math.isfinite(rank):
        return None
    return WaitingRequest(f"{ms}-{number}", tenant, priority_of(rank), size, max(0, now_ms - ms) / 1000)

"""Streams and sorted sets as tests read and write them; redis-py types an answer as what any client might get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from penstock.protocol import keys
from penstock.protocol.redis.connection import Fields, RedisClient

Entries: TypeAlias = list[tuple[str, dict[str, str]]]
RawEntries: TypeAlias = list[tuple[bytes, Fields]]


async def read_stream(redis: RedisClient, key: str) -> Entries:
    """Returns the entries of a stream, oldest first, by a client whose answers are text."""
    return cast("Entries", await redis.xrange(key))


async def read_raw_stream(raw: RedisClient, key: str) -> RawEntries:
    """Returns the entries of a stream, oldest first, by a client whose answers are bytes."""
    return cast("RawEntries", await raw.xrange(key))


async def read_owners(redis: RedisClient, key: str, owner: str | None = None) -> dict[str, str]:
    """Returns the consumers of a group's pending entries, of `owner` alone if given, by a client of either kind."""
    found = await redis.xpending_range(key, keys.GROUP, "-", "+", 100, owner)
    return {text_of(entry["message_id"]): text_of(entry["consumer"]) for entry in found}


async def add_entry(
    redis: RedisClient, key: str, fields: Mapping[Any, str | bytes | float], entry_id: str = "*"
) -> str:
    """Sends XADD, by a client of either kind; returns the id of the entry."""
    added = await redis.xadd(key, dict(fields), id=entry_id)
    return text_of(added)


async def read_scores(redis: RedisClient, key: str) -> dict[str, float]:
    """Returns the members of a sorted set and their scores, lowest first, by a client of either kind."""
    found = cast("list[tuple[str | bytes, float]]", await redis.zrange(key, 0, -1, withscores=True))
    return {text_of(member): score for member, score in found}


def text_of(answer: object) -> str:
    return answer.decode() if isinstance(answer, bytes) else str(answer)

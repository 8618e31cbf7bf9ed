"""Reads Redis Streams, cheaply where it happens for every chunk."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, cast

from redis import exceptions
from redis.asyncio import RedisCluster

from penstock.protocol.redis.connection import COMMAND_TIMEOUT_S, Fields, RedisClient
from penstock.protocol.redis.moves import Witness
from penstock.protocol.redis.pipeline import execute

Streams: TypeAlias = list[tuple[bytes, list[tuple[bytes, Fields]]]]
"""Pairs of (stream, [(entry id, fields)])."""


async def read_streams(
    redis: RedisClient,
    cursors: Mapping[str, str],
    *,
    count: int,
    block_s: float | None,
    witness: Witness | None = None,
) -> Streams:
    """XREADs streams that share a hash slot: what follows each cursor, at most `count` entries of each.

    Waits up to `block_s` for the first entry, not at all with None. Nothing is sent twice. With a `witness` it fails
    like a lost connection once the server takes no writes any more.
    """
    before = None if witness is None else witness.due()
    block: tuple[str | int, ...] = () if block_s is None else ("BLOCK", round(block_s * 1000))
    command = ("XREAD", "COUNT", count, *block, "STREAMS", *cursors, *cursors.values())
    if isinstance(redis, RedisCluster):
        # The library would ask the server for the keys of each XREAD; any one of them identifies the node.
        await redis.initialize()
        if before is not None:
            with suppress(exceptions.ResponseError):
                await redis.execute_command(*before)
        node = redis.get_node_from_key(next(iter(cursors)))
        return stream_entries(await redis.execute_command(*command, target_nodes=node))
    commands = [command] if before is None else [before, command]
    *_, answer = await execute(redis, commands, timeout_s=(block_s or 0.0) + COMMAND_TIMEOUT_S)
    if isinstance(answer, Exception):
        raise answer
    streams = answer.items() if isinstance(answer, Mapping) else answer or ()  # protocols 3 and 2
    return [(stream, [(entry_id, pairs(flat)) for entry_id, flat in entries]) for stream, entries in streams]


def is_entry_id(text: str) -> bool:
    """Whether the text is an entry id that a server accepts: two 64-bit numbers."""
    match = re.fullmatch(r"([0-9]{1,20})-([0-9]{1,20})", text)
    return match is not None and max(map(int, match.groups())) < 2**64


async def read_range(
    redis: RedisClient, key: str, start: str = "-", end: str = "+", *, count: int
) -> list[tuple[str, Fields]]:
    """Returns at most `count` entries from `start` to `end` (XRANGE), for a client that does not decode."""
    entries = await redis.xrange(key, start, end, count)
    return [(raw_id.decode(), fields) for raw_id, fields in cast("list[tuple[bytes, Fields]]", entries)]


async def read_newest(redis: RedisClient, key: str) -> tuple[str, Fields] | None:
    """Returns the last entry of a stream, for a client that does not decode."""
    entries = cast("list[tuple[bytes, Fields]]", await redis.xrevrange(key, count=1))
    return (entries[0][0].decode(), entries[0][1]) if entries else None


def stream_entries(answer: Any) -> Streams:
    """Gives the library's answers to XREAD and XREADGROUP under protocols 2 and 3 the same shape.

    The fields of an entry that was deleted meanwhile are an empty mapping.
    """
    if not answer:
        return []
    found = []
    for stream, entries in answer.items() if isinstance(answer, Mapping) else answer:
        if len(entries) == 1 and isinstance(entries[0], list):
            entries = entries[0]  # noqa: PLW2901  protocol 3 wraps them once more
        found.append((stream, [(entry_id, fields or {}) for entry_id, fields in entries]))
    return found


def pairs(flat: Sequence[Any]) -> Fields:
    """Returns an entry's fields from the server's list: name, value, name, value, ..."""
    return dict(zip(flat[::2], flat[1::2], strict=True))

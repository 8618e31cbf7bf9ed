"""The enqueue script, and how any script is run.

A script's keys share one hash slot, and running it twice is the same as running it once: the Redis library repeats a
command whose answer was lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from redis import exceptions

from penstock.producer import keys
from penstock.producer.redis.pipeline import script_hash
from penstock.producer.wire import MAX_FIELDS

Execute: TypeAlias = Callable[..., Awaitable[Any]]
"""Sends one command, given as its parts: `execute_command` of a client, or `execute` of a `Batcher`."""


@dataclass(frozen=True, slots=True)
class Added:
    """The request stands in the queue as `entry_id`; `again` if it already did before this call."""

    entry_id: str
    again: bool


@dataclass(frozen=True, slots=True)
class Full:
    """The request was not added: the queue holds `length` requests."""

    length: int


class Script:
    """Lua source that runs by its hash, and is sent in full only to a server that does not know it yet."""

    def __init__(self, source: str) -> None:
        self._source = source

    async def __call__(self, execute: Execute, script_keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        try:
            return await execute("EVALSHA", script_hash(self._source), len(script_keys), *script_keys, *arguments)
        except exceptions.NoScriptError:
            return await execute("EVAL", self._source, len(script_keys), *script_keys, *arguments)


async def enqueue(
    execute: Execute,
    queue: str,
    request_id: str,
    fields: Mapping[str, str],
    *,
    max_length: int | None,
    dedupe_window_s: int,
) -> Added | Full:
    """Appends a request to its queue, once: the same id within `dedupe_window_s` finds the entry that is there.

    `max_length` bounds the requests that are waiting or running, as both stay in the stream until they end. The length
    check, the append and the mark are one step on the server. A queue that did not exist gets its consumer group.

    Raises:
        ValueError: more than `MAX_FIELDS` fields, which no worker would read; Lua's limit is at some thousands.
    """
    if len(fields) > MAX_FIELDS:
        raise ValueError(f"the entry has {len(fields)} fields, the limit is {MAX_FIELDS}")
    pairs = [part for pair in fields.items() for part in pair]
    verdict, value = await _ENQUEUE(
        execute,
        [keys.requests(queue), keys.seen(queue, request_id)],
        [max_length or 0, dedupe_window_s, keys.GROUP, *pairs],
    )
    if verdict == _FULL:
        return Full(int(value))
    return Added(value.decode() if isinstance(value, bytes) else value, again=verdict == _AGAIN)


_ADDED, _AGAIN, _FULL = 0, 1, 2

_ENQUEUE = Script(
    f"""
    local entry = redis.call('GET', KEYS[2])
    if entry then return {{{_AGAIN}, entry}} end
    local limit = tonumber(ARGV[1])
    local length = redis.call('XLEN', KEYS[1])
    if limit > 0 and length >= limit then return {{{_FULL}, length}} end
    if redis.call('EXISTS', KEYS[1]) == 0 then
        redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[3], '0', 'MKSTREAM')
    end
    entry = redis.call('XADD', KEYS[1], '*', unpack(ARGV, 4))
    redis.call('SET', KEYS[2], entry, 'EX', ARGV[2])
    return {{{_ADDED}, entry}}
    """
)

"""Enqueues requests, by a script that checks, appends and marks in one step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.protocol import keys, lua
from penstock.protocol.wire import MAX_FIELDS

Execute: TypeAlias = Callable[..., Awaitable[Any]]
"""Sends one command, given as its parts: `execute_command` of a client, or `execute` of a `Batcher`."""

_ENQUEUE = lua.load("penstock.protocol.queue", "enqueue")


@dataclass(frozen=True, slots=True)
class Added:
    """The request is in the queue as `entry_id`; `again` if it already was before this call."""

    entry_id: str
    again: bool


@dataclass(frozen=True, slots=True)
class Full:
    """The request was not added: the queue holds `length` requests."""

    length: int


@dataclass(frozen=True, slots=True)
class Late:
    """The request was not added: it would expire behind the queue's `length` requests."""

    length: int
    wait_s: float  # until a worker would take it, estimated


async def enqueue(
    execute: Execute,
    queue: str,
    request_id: str,
    fields: Mapping[str, str],
    *,
    max_length: int | None,
    dedupe_window_s: int,
    looks_ahead: bool = True,
) -> Added | Full | Late:
    """Appends a request to its queue, once: the same id within `dedupe_window_s` returns the existing entry.

    `max_length` limits the requests that wait or run, as both stay in the stream until they end. With `looks_ahead`, a
    request with a `timeout_s` is refused if it would expire before its turn, given the work ahead of it and the
    workers' speed; docs/scaling.md has the estimate. The checks, the append and the mark are one step on the server. A
    new queue gets its consumer group.

    Raises:
        ValueError: more than `MAX_FIELDS` fields, which no worker would read; Lua's limit is some thousands.
    """
    if len(fields) > MAX_FIELDS:
        raise ValueError(f"the entry has {len(fields)} fields, the limit is {MAX_FIELDS}")
    flat = [part for pair in fields.items() for part in pair]
    timeout_s, priority, tenant = fields.get("timeout_s", ""), fields.get("priority", "0"), fields.get("tenant", "")
    key_names = [keys.requests(queue), keys.seen(queue, request_id)]
    if looks_ahead and timeout_s:
        key_names += (keys.load(queue), keys.lane(queue, tenant), keys.band(queue, priority), keys.weights(queue))
    arguments: tuple[str | int, ...] = (
        max_length or 0,
        dedupe_window_s,
        keys.GROUP,
        timeout_s,
        priority,
        tenant,
        *flat,
    )
    entry, number, *wait = await execute(*lua.call(_ENQUEUE, key_names, arguments))
    if entry is None:
        return Late(int(number), float(wait[0])) if wait else Full(int(number))
    return Added(entry.decode() if isinstance(entry, bytes) else entry, again=bool(number))

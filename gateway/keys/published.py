"""Reads what workers have published of a reply: a request's use so far, no matter who reads the reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.producer import AsyncClient, ReplyCorrupt, ReplyGone, ServerRefused
from penstock.producer.reading.entries import decode_fields
from penstock.protocol import keys
from penstock.protocol.queue.enqueue import Execute
from penstock.protocol.redis.connection import Fields
from penstock.protocol.redis.faults import is_junk
from penstock.protocol.redis.streams import pairs
from penstock.protocol.wire import ReplyEntry

NEWEST = 8  # entries that are looked at: each of several choices has its own

Stage: TypeAlias = Literal["unknown", "waiting", "running", "ended"]


@dataclass(frozen=True, slots=True)
class Published:
    """Published state of a reply. `unknown`: nobody has sent its request."""

    stage: Stage
    num_tokens: int | None  # at least that many, and all of them once it has ended; None: no longer known


async def published(execute: Execute, client: AsyncClient, queue: str, request_id: str) -> Published:
    """Returns what is known of the reply to a request.

    Args:
        execute: sends one command.
        client: a client of any queue.
        queue: the request's.
        request_id: its id.

    Raises:
        ConnectionLost, ServerRefused: Redis is away or refuses.
    """
    try:
        found = await execute("XREVRANGE", keys.reply(queue, request_id), "+", "-", "COUNT", NEWEST)
        entries = [decode_fields(request_id, _fields(flat)) for _, flat in found]
        if entries:
            return _derive(entries)
        state = await client.handle(request_id, queue=queue).state()
    except (ReplyGone, ReplyCorrupt, ValueError):  # it can't continue, and would count for days
        return Published("ended", None)
    except ServerRefused as error:
        if is_junk(error):
            return Published("ended", None)
        raise
    return Published("unknown" if state == "unknown" else "waiting", 0)


def _fields(entry: Any) -> Fields:
    """Returns an entry's fields, which a cluster's client returns as a mapping."""
    return entry if isinstance(entry, dict) else pairs(entry)


def _derive(newest: list[ReplyEntry]) -> Published:
    """Derives the state from the reply's last entries, newest first."""
    last = newest[0]
    if last.type == "end":
        return Published("ended", last.prompt_tokens + last.completion_tokens)
    so_far: dict[int, int] = {}
    for entry in newest:
        if entry.type == "chunk":
            so_far.setdefault(entry.index, entry.offset + len(entry.tokens))
    return Published("running", sum(so_far.values()))

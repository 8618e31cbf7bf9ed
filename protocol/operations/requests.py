"""State of one request, without its text: for an operator of the queue who has its id."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from redis import exceptions

from penstock.protocol import keys
from penstock.protocol.consumers import is_worker
from penstock.protocol.operations.collector import look
from penstock.protocol.operations.dead_letters import owners
from penstock.protocol.operations.snapshot import Snapshot
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.faults import is_no_group
from penstock.protocol.redis.streams import is_entry_id, read_newest

RequestState: TypeAlias = Literal["waiting", "running", "lost", "ended", "unknown"]
"""`lost`: its worker is gone, and another one is about to take it. `unknown`: it was never sent, was forgotten, or
waits under an id of its own that no client library has noted.
"""

_COUNTS = ("attempts", "crashes", "handbacks")
_OF_STATE = ("status", "worker", "entry", "tenant", *_COUNTS)


@dataclass(frozen=True, slots=True)
class RequestView:
    """State of a request."""

    id: str
    state: RequestState
    entry: str | None  # in the queue; None: not known
    age_s: float | None  # since its enqueue
    tenant: str | None
    worker: str | None  # the worker that has it, or had it last
    claims: tuple[tuple[int, str], ...]  # (epoch, worker), as far as its reply is kept
    crashes: int | None  # workers that died on it; None: no worker has had it
    handbacks: int | None  # workers that gave it back
    prompt_tokens: int | None
    tokens: int | None  # generated so far; in all, if it ended
    finish_reason: str | None
    code: str | None  # of the error that it ended with

    @property
    def takeovers(self) -> int:
        return max(0, len(self.claims) - 1)


async def look_up(redis: RedisClient, queue: str, request_id: str) -> RequestView:
    """Returns what is known of a request, for a client that does not decode.

    Raises:
        RedisError, OSError: the server can't be reached, or refuses.
    """
    noted: Sequence[Any]
    snapshot, noted, newest, claims = await asyncio.gather(
        look(redis, queue),
        redis.hmget(keys.state(queue, request_id), list(_OF_STATE)),
        read_newest(redis, keys.reply(queue, request_id)),
        owners(redis, queue, request_id),
    )
    state = {name: _text(value) for name, value in zip(_OF_STATE, noted, strict=True) if value is not None}
    entry = state.get("entry") or await _entry_of(redis, queue, request_id)
    if entry is not None and not is_entry_id(entry):  # not written by Penstock
        entry = None
    end = newest[1] if newest is not None and newest[1].get(b"type") == b"end" else None
    running = next((each for each in snapshot.running if each.id == request_id), None)
    holder = None if end is not None or entry is None else await _holder(redis, queue, entry)
    return RequestView(
        id=request_id,
        state="ended" if end is not None else _state(state, holder, snapshot),
        entry=entry,
        age_s=None if entry is None else max(0, snapshot.at_ms - int(entry.partition("-")[0])) / 1000,
        tenant=state.get("tenant"),
        worker=state.get("worker"),
        claims=tuple(claims),
        crashes=_number(state.get("crashes", "0")) if state else None,
        handbacks=_number(state.get("handbacks", "0")) if state else None,
        prompt_tokens=_count(end, b"prompt_tokens", None if running is None else running.prompt_tokens),
        tokens=_count(end, b"completion_tokens", None if running is None else running.tokens),
        finish_reason=None if end is None else _text(end.get(b"finish_reason", b"")),
        code=None if end is None or b"code" not in end else _text(end[b"code"]),
    )


def _state(noted: dict[str, str], holder: str | None, snapshot: Snapshot) -> RequestState:
    if noted.get("status") in ("done", "dead"):
        return "ended"
    if noted.get("status") == "running":
        live = {worker.name for worker in snapshot.workers if worker.is_live}
        return "running" if noted.get("worker") in live else "lost"
    if noted or holder is not None:
        return "running" if holder is not None and is_worker(holder) else "waiting"
    return "unknown"


async def _entry_of(redis: RedisClient, queue: str, request_id: str) -> str | None:
    """Returns the queue entry that the client library noted, or else the one that has this id."""
    entry: Any = await redis.get(keys.seen(queue, request_id))
    if entry is not None:
        return None if _text(entry) == keys.NO_ENTRY else _text(entry)
    return request_id


async def _holder(redis: RedisClient, queue: str, entry: str) -> str | None:
    """Returns the consumer that has an entry, `waiting` if nobody has read it; None: it is not in the queue."""
    stream = keys.requests(queue)
    try:
        pending: Any = await redis.xpending_range(stream, keys.GROUP, entry, entry, 1)
        if pending:
            return _text(pending[0]["consumer"])
        groups: Any = await redis.xinfo_groups(stream)
    except exceptions.ResponseError as error:
        if is_no_group(error):
            return None
        raise
    last = next((_text(group["last-delivered-id"]) for group in groups if group["name"] == keys.GROUP.encode()), None)
    return keys.WAITING if last is not None and _place(entry) > _place(last) else None


def _place(entry: str) -> tuple[int, ...]:
    return tuple(map(int, entry.split("-")))


def _count(end: dict[bytes, bytes] | None, name: bytes, running: int | None) -> int | None:
    return running if end is None else _number(_text(end.get(name, b"")))


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _text(value: bytes) -> str:
    return value.decode(errors="backslashreplace")

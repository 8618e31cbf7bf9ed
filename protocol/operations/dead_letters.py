"""Dead letters of a queue: requests that were given up, which can be inspected, replayed or removed.

Entries that could not be read as a request are letters too, on a stream of their own.

A replayed request gets a new id, and so a new reply. The old reply has had its one `end`, which its reader may have
acted on; writing on after it would break the promise that an end is final. The new id names its origin, `<old
id>.replay-<letter>`, and is as hard to guess as the old one.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from penstock.protocol import keys, lua
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.streams import is_entry_id, read_range
from penstock.protocol.wire import MAX_FIELDS

PAGE = 50  # letters read at a time; each may hold a whole request
REMOVE_PAGE = 500
SEEN_TTL_S = 86_400  # as for any other enqueue
MAX_OLD_ID_CHARS = 80  # of a replayed request's id, which has at most 128
COUNTS = ("attempts", "crashes", "strikes", "handbacks")

_REPLAY = lua.load("penstock.protocol.operations", "replay")
_REMOVE = lua.load("penstock.protocol.operations", "remove")
_TIME = "return redis.call('TIME')"  # as a script, because TIME itself names no key, and so no server

_REPLAYED = re.compile(r"\.replay-\d+-\d+$")


Kind: TypeAlias = Literal["request", "malformed"]
"""`malformed`: no worker could read the entry as a request."""

KINDS: tuple[Kind, ...] = get_args(Kind)


class NotReplayable(ValueError):
    """The letter does not hold its request, as that was over a limit."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A request that was given up, or an entry that never was a request."""

    kind: Kind
    id: str  # of the entry on the dead-letter stream; its first half is when the request was given up
    request_id: str
    entry_id: str  # of the queue entry; its first half is when the request was enqueued
    code: str
    message: str
    worker: str  # the worker that gave it up
    counts: Mapping[str, int]  # of COUNTS; empty if no worker ever claimed it
    fields: Mapping[bytes, bytes]  # of the queue entry; empty if that was over a limit

    @property
    def given_up_ms(self) -> int:
        """Server time in ms when the request was given up."""
        return int(self.id.partition("-")[0])

    @property
    def enqueued_ms(self) -> int | None:
        """Server time in ms of the enqueue; None if the letter does not say, because Penstock did not write it."""
        return _number(self.entry_id.partition("-")[0])

    @property
    def replay_id(self) -> str:
        """The id that the request gets when it is replayed: always the same for the same letter."""
        origin = _REPLAYED.sub("", self.request_id)[:MAX_OLD_ID_CHARS]
        return f"{origin}.replay-{self.id}"

    def request(self) -> dict[str, Any]:
        """Returns the original request: its JSON document, or its flat fields as text."""
        document = self._document()
        if document is not None:
            return document
        return {_text(name): _text(value) for name, value in self.fields.items()}

    def replay_fields(self) -> list[bytes]:
        """Returns the fields of the new queue entry: those of the old one under the new id.

        Raises:
            NotReplayable: they were not kept, or are more than a worker would read.
        """
        if not self.fields:
            raise NotReplayable(f"letter {self.id} holds no request to send again, only why it was given up")
        if len(self.fields) >= MAX_FIELDS:
            raise NotReplayable(
                f"letter {self.id} holds {len(self.fields)} fields, no request has more than {MAX_FIELDS}"
            )
        fields = {**self.fields, b"id": self.replay_id.encode()}
        document = self._document()
        if document is not None:
            fields[b"request"] = json.dumps({**document, "id": self.replay_id}).encode()
        return [part for field in fields.items() for part in field]

    def _document(self) -> dict[str, Any] | None:
        try:
            document = json.loads(self.fields.get(b"request", b""))
        except (ValueError, RecursionError):
            return None
        return document if isinstance(document, dict) else None


def stream_of(queue: str, kind: Kind) -> str:
    """Returns the key of the stream that letters of this kind are on."""
    return keys.dead(queue) if kind == "request" else keys.malformed(queue)


async def read_letters(
    redis: RedisClient, queue: str, kind: Kind = "request", *, newest_first: bool = False
) -> AsyncIterator[Letter]:
    """Yields all letters of a kind, for a client that does not decode."""
    key, bound = stream_of(queue, kind), "+" if newest_first else "-"
    while True:
        if newest_first:
            page: Any = await redis.xrevrange(key, max=bound, count=PAGE)
        else:
            page = await redis.xrange(key, min=bound, count=PAGE)
        for letter_id, fields in page:
            yield _letter(kind, letter_id.decode(), fields)
        if len(page) < PAGE:
            return
        bound = "(" + page[-1][0].decode()


async def find_letters(redis: RedisClient, queue: str, name: str, kind: Kind = "request") -> list[Letter]:
    """Returns the letter with this id, or else those about the request with this id, oldest first.

    Letters of different kinds may have the same id.
    """
    if re.fullmatch(r"\d+-\d+", name):
        page: Any = await redis.xrange(stream_of(queue, kind), min=name, max=name)
        if page:
            return [_letter(kind, name, page[0][1])]
    return [letter async for letter in read_letters(redis, queue, kind) if letter.request_id == name]


async def replay(redis: RedisClient, queue: str, letter: Letter) -> str | None:
    """Moves a request back into its queue, in one step on the server; returns its new id, None if the letter is gone.

    Calls repeated, even by others at the same time, send the request once. Its deadline counts from now, it joins at
    the end of the queue, and no limit on the queue's length applies.

    Raises:
        NotReplayable: the letter does not hold the request.
    """
    key_names = [*_letter_keys(queue, letter.kind), keys.requests(queue), keys.seen(queue, letter.replay_id)]
    arguments: tuple[str | bytes | int, ...] = (letter.id, SEEN_TTL_S, keys.GROUP, *letter.replay_fields())
    entry = await redis.execute_command(*lua.call(_REPLAY, key_names, arguments))
    return letter.replay_id if entry is not None else None


async def remove(redis: RedisClient, queue: str, kind: Kind, letter_ids: Sequence[str]) -> int:
    """Deletes letters; returns how many of them were still there."""
    removed = 0
    for start in range(0, len(letter_ids), REMOVE_PAGE):
        page = letter_ids[start : start + REMOVE_PAGE]
        removed += int(await redis.execute_command(*lua.call(_REMOVE, _letter_keys(queue, kind), page)))
    return removed


async def server_ms(redis: RedisClient, queue: str) -> int:
    """Returns the time of the clock that dates the letters of `queue`, in ms."""
    seconds, micros = await redis.execute_command(*lua.call(_TIME, [keys.dead(queue)], []))
    return int(seconds) * 1000 + int(micros) // 1000


async def owners(redis: RedisClient, queue: str, request_id: str) -> list[tuple[int, str]]:
    """Returns (epoch, worker) for each claim of a request, as far as its reply is still kept."""
    found = []
    bound = "0-0"
    while is_entry_id(bound) and (page := await read_range(redis, keys.reply(queue, request_id), bound, count=1)):
        ((entry_id, fields),) = page
        epoch = int(entry_id.partition("-")[0])
        if fields.get(b"type") == b"own":
            found.append((epoch, _text(fields.get(b"worker", b""))))
        bound = f"{epoch + 1}-0"  # the claim's chunks lie between
    return found


def _letter_keys(queue: str, kind: Kind) -> list[str]:
    stream = stream_of(queue, kind)
    return [stream, keys.letter_sizes(stream), keys.letter_bytes(stream)]


def _letter(kind: Kind, letter_id: str, fields: Mapping[bytes, bytes]) -> Letter:
    return Letter(
        kind=kind,
        id=letter_id,
        request_id=_text(fields.get(b"id", b"")),
        entry_id=_text(fields.get(b"entry", b"")),
        code=_text(fields.get(b"code", b"")),
        message=_text(fields.get(b"message", b"")),
        worker=_text(fields.get(b"worker", b"")),
        counts={
            name: count for name in COUNTS if (count := _number(_text(fields.get(name.encode(), b"")))) is not None
        },
        fields={name.removeprefix(b"field:"): value for name, value in fields.items() if name.startswith(b"field:")},
    )


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,20}", text) else None


def _text(value: bytes) -> str:
    return value.decode(errors="backslashreplace")

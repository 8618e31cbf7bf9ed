"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), as replies become them.

The id of an event is `<entry id>.<place>`: the entry of the reply stream that it is made from, and its place among the
events of that entry. So it is a function of the reply alone, and any replica can go on behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeAlias

from penstock.gateway.errors import ApiError
from penstock.producer import Chunk, Reply

PING = b": ping\n\n"

Place: TypeAlias = tuple[int, int, int]
"""An event's id, as numbers that compare as events follow each other."""

BEFORE_ALL: Place = (0, 0, -1)

OPENING = "0-0"
"""The entry, so to speak, of events that come before the reply's first."""


class Event(NamedTuple):
    """`data` is one line."""

    data: str
    name: str | None = None


class EventWriter(Protocol):
    """One API's events of one reply, which is fed to it from its beginning: what it gives depends on that alone."""

    def chunk(self, chunk: Chunk) -> Iterable[Event | None]:
        """None has a place like every event, and is not sent: the client has it."""

    def end(self, reply: Reply) -> Iterable[Event | None]:
        """The last ones."""

    def error(self, error: ApiError) -> Iterable[Event | None]:
        """Those that say what ended the stream before its end."""


def place_of(event_id: str) -> Place:
    """Raises ValueError where it is none."""
    entry, dot, place = event_id.partition(".")
    epoch, dash, number = entry.partition("-")
    if not (dot and dash and all(part.isascii() and part.isdigit() for part in (epoch, number, place))):
        raise ValueError(f"{event_id[:80]!r} is no id of an event")
    return int(epoch), int(number), int(place)


def entry_of(entry_id: str) -> tuple[int, int]:
    """An entry's id, as numbers that compare as entries follow each other."""
    epoch, _, number = entry_id.partition("-")
    return int(epoch), int(number)


def encode(events: Iterable[Event | None], entry_id: str | None = None, after: Place = BEFORE_ALL) -> bytes:
    """The bytes of the events of one entry, of those that come after `after`. Without an entry they have no ids.

    All events are taken, also those that are left out: a writer goes by what it has written.
    """
    first = 0 if entry_id is None else _first_after(entry_of(entry_id), after)
    lines: list[str] = []
    for place, event in enumerate(events):
        if place < first or event is None:
            continue
        data, name = event
        if entry_id is not None:
            lines.append(f"id: {entry_id}.{place}\n")
        if name is not None:
            lines.append(f"event: {name}\n")
        lines.append(f"data: {data}\n\n")
    return "".join(lines).encode()


def _first_after(entry: tuple[int, int], after: Place) -> float:
    """The place of the first event of `entry` that comes after `after`."""
    if entry < after[:2]:
        return math.inf
    return after[2] + 1 if entry == after[:2] else 0

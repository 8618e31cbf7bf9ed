"""Replies as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

The id of an event is `<entry id>.<place>`: the reply stream's entry that it is made from, and its place among that
entry's events. So it depends on the reply alone, and any replica can continue after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeAlias

from penstock.gateway.errors import ApiError
from penstock.producer import Chunk, Prefill, Reply

PING = b": ping\n\n"
"""A comment: readers of events pass over it."""

Place: TypeAlias = tuple[int, int, int]
"""An event's id, as numbers that compare in the order of events."""

BEFORE_ALL: Place = (0, 0, -1)

OPENING = "0-0"
"""Stands for the entry of events that come before the reply's first."""


class ServerSentEvent(NamedTuple):
    """`data` is one line."""

    data: str
    name: str | None = None


class EventWriter(Protocol):
    """Writes one API's events for one reply, which is fed to it from its beginning. The events depend on that alone."""

    def chunk(self, chunk: Chunk) -> Iterable[ServerSentEvent | None]:
        """Returns a chunk's events. None has a place like an event, but is not sent: the client has it."""

    def end(self, reply: Reply) -> Iterable[ServerSentEvent | None]:
        """Returns the last events."""

    def error(self, error: ApiError) -> Iterable[ServerSentEvent | None]:
        """Returns the events that say why the stream ended early."""


def prefill_comment(prefill: Prefill) -> bytes:
    """Returns a comment that says how far a long prompt is computed."""
    return f": prefill {prefill.done}/{prefill.total}\n\n".encode()


def place_of(event_id: str) -> Place:
    """Parses an event's id. Raises ValueError if it is not one."""
    entry, dot, place = event_id.partition(".")
    epoch, dash, number = entry.partition("-")
    if not (dot and dash and all(part.isascii() and part.isdigit() for part in (epoch, number, place))):
        raise ValueError(f"{event_id[:80]!r} is not the id of an event")
    return int(epoch), int(number), int(place)


def entry_of(entry_id: str) -> tuple[int, int]:
    """Returns an entry's id as numbers that compare in the order of entries."""
    epoch, _, number = entry_id.partition("-")
    return int(epoch), int(number)


def encode(events: Iterable[ServerSentEvent | None], entry_id: str | None = None, after: Place = BEFORE_ALL) -> bytes:
    """Encodes the events of one entry that come after `after`. Without an entry they have no ids.

    All events are consumed, even those left out: a writer depends on what it has written.
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
    """Returns the place of the first event of `entry` that comes after `after`."""
    if entry < after[:2]:
        return math.inf
    return after[2] + 1 if entry == after[:2] else 0

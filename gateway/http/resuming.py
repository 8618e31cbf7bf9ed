"""Checks that the event after which a client continues belongs to the answer. Until then no status is sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeAlias

from starlette.requests import Request

from penstock.gateway.errors import ApiError
from penstock.gateway.http.events import BEFORE_ALL, Place, place_of

Entry: TypeAlias = tuple[float, float]
"""An entry's id, as numbers that compare in the order of entries."""

NO_ENTRY: Entry = (0, 0)
AFTER_ALL: Entry = (math.inf, math.inf)

PLACE_HEADER = "Last-Event-ID"


class Sought(Protocol):
    """The last event that a client has, which is looked for as the answer's entries arrive."""

    def is_reached(self, entry: Entry, num_events: int) -> bool:
        """Whether it is among the events so far, of which the last `num_events` are those of `entry`.

        Raises:
            ApiError: it can no longer appear (400).
        """


class SoughtPlace:
    """An event sought by its id, `place`."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def is_reached(self, entry: Entry, num_events: int) -> bool:
        if entry < self._place[:2]:
            return False
        if entry > self._place[:2] or num_events <= self._place[2]:
            raise _no_such_place(self._place)
        return True


class SoughtNumber:
    """An event sought by its number.

    Args:
        number: the event's.
        param: the field that names it.
        num_given: returns the number of events so far.
        newest: the last entry of the answer when the client came back.
    """

    def __init__(self, number: int, param: str, num_given: Callable[[], int], newest: Entry) -> None:
        self._number = number
        self._param = param
        self._num_given = num_given
        self._newest = newest

    def is_reached(self, entry: Entry, num_events: int) -> bool:
        if self._number < self._num_given():
            return True
        if entry >= self._newest:
            raise _no_such_event(self._param, str(self._number))
        return False


def sent_place(asked: Request) -> Place:
    """Returns the last event that the client has, from `PLACE_HEADER`.

    Raises:
        ApiError: it is not an event's id.
    """
    event_id = asked.headers.get(PLACE_HEADER)
    if event_id is None:
        return BEFORE_ALL
    try:
        return place_of(event_id)
    except ValueError as error:
        raise ApiError(400, f"{PLACE_HEADER}: {error}", param=PLACE_HEADER, code="invalid_event_id") from None


def check_written(place: Place, newest: Entry) -> None:
    """Passes if an answer whose last entry is `newest` reaches as far as `place`.

    Raises:
        ApiError: it does not (400).
    """
    if place[:2] > newest:
        raise _no_such_place(place)


def _no_such_place(place: Place) -> ApiError:
    epoch, number, nth = place
    return _no_such_event(PLACE_HEADER, f"{epoch}-{number}.{nth}"[:80])


def _no_such_event(param: str, event: str) -> ApiError:
    message = f"{param}: {event!r} is not an event of this answer"
    return ApiError(400, message, param=param, code="invalid_event_id")

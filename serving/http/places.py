"""Places of one server's connections, and which of them are closed when there are too many."""

from __future__ import annotations

from typing import Protocol

NUM_KEPT = 64
"""Connections in addition to those that may be served.

In these places, newcomers wait for their headers to be read, probes are answered, and others are told that the server
is full. There are several times as many places as connections accepted at once, so that no client that sends its
request at once is turned away unread.
"""

NUM_LEAVING = 64
"""Connections in addition to all of these, which were refused and have time to read the answer."""


class Connection(Protocol):
    def turn_away(self) -> None:
        """Tells the client that the server is full, after which it leaves."""

    def cut(self) -> None:
        """Closes the connection at once."""


class Places:
    """A connection is in one of four sets, each in order of arrival.

    At most `max_connections` read or answer, `NUM_KEPT` more wait, and `NUM_LEAVING` more leave. A client that holds
    connections open, or keeps opening them, shuts out neither a client that sends its request at once nor a probe.

    Attributes:
        waiting: for the head of a request; also those answering a probe, which takes no place.
        reading: the body of a request.
        answering: a request that came whole.
        leaving: refused; further input is dropped.
        num_turned_away: how many were told that the server is full.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self.waiting: dict[Connection, None] = {}
        self.reading: dict[Connection, None] = {}
        self.answering: dict[Connection, None] = {}
        self.leaving: dict[Connection, None] = {}
        self.num_turned_away = 0

    def admit(self) -> None:
        """Makes room for a connection that has just begun to wait."""
        most = self._max_connections + NUM_KEPT
        if self._num_served + len(self.waiting) > most:
            self._turn_away(self.waiting)
        while self.leaving and self._num_served + len(self.waiting) + len(self.leaving) > most + NUM_LEAVING:
            next(iter(self.leaving)).cut()

    def has_room(self) -> bool:
        """Whether one more request may be read. If need be, one whose body has not come yet is turned away for it."""
        if self._num_served < self._max_connections:
            return True
        if self.reading:
            self._turn_away(self.reading)
            return True
        self.num_turned_away += 1
        return False

    def stand(self, connection: Connection, where: dict[Connection, None]) -> None:
        """Puts a connection at the end of one of the sets; if it is there already, it keeps its place."""
        if connection not in where:
            self.leave(connection)
            where[connection] = None

    def leave(self, connection: Connection) -> None:
        for each in (self.waiting, self.reading, self.answering, self.leaving):
            each.pop(connection, None)

    @property
    def _num_served(self) -> int:
        return len(self.reading) + len(self.answering)

    def _turn_away(self, among: dict[Connection, None]) -> None:
        self.num_turned_away += 1
        next(iter(among)).turn_away()

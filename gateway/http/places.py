"""Where the connections of one server stand, and which of them go when they are too many."""

from __future__ import annotations

from typing import Protocol

NUM_KEPT = 64
"""Connections on top of those that may be served: newcomers are looked at there, probes are answered, others are told
that the server is full. They are several times as many as are accepted at once, so that nobody who asks at once is
turned away unread.
"""

NUM_LEAVING = 64
"""Those on top of these that have been told no, and may read it."""


class Connection(Protocol):
    def turn_away(self) -> None:
        """Tells it that the server is full, after which it leaves."""

    def cut(self) -> None:
        """Closes it at once."""


class Places:
    """A connection stands in one of four sets, in each of which who has been there longest comes first.

    At most `max_connections` read or answer, `NUM_KEPT` more wait, and `NUM_LEAVING` more leave. Who holds connections
    open, or goes on opening them, keeps out neither a client that sends its request at once nor a probe.

    Attributes:
        waiting: for the head of a request; or a probe is being answered, which takes no place.
        reading: the body of a request.
        answering: a request that came whole.
        leaving: they were told no, and whatever they still send is dropped.
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
        """Makes room for one that has just begun to wait."""
        most = self._max_connections + NUM_KEPT
        if self._num_served + len(self.waiting) > most:
            self._turn_away(self.waiting)
        while self.leaving and self._num_served + len(self.waiting) + len(self.leaving) > most + NUM_LEAVING:
            next(iter(self.leaving)).cut()

    def has_room(self) -> bool:
        """Whether one more request may be read. It may where another one's body is still to come, which then goes."""
        if self._num_served < self._max_connections:
            return True
        if self.reading:
            self._turn_away(self.reading)
            return True
        self.num_turned_away += 1
        return False

    def stand(self, connection: Connection, where: dict[Connection, None]) -> None:
        """Puts it at the end of one of the sets; where it stands there already, it keeps its place."""
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

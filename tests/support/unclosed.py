"""Finds connections to Redis that a test has left open, at the end of that test.

The garbage collector would report them too, but in whichever test it runs.
"""

from __future__ import annotations

from functools import wraps
from weakref import WeakSet

from redis.asyncio.connection import AbstractConnection

_made: WeakSet[AbstractConnection] = WeakSet()
_make = AbstractConnection.__init__


@wraps(_make)
def _note(connection: AbstractConnection, *args: object, **options: object) -> None:
    _make(connection, *args, **options)  # type: ignore[arg-type]
    _made.add(connection)


AbstractConnection.__init__ = _note  # type: ignore[method-assign, assignment]


def unclosed_connections() -> list[str]:
    """Returns the connections of event loops that have ended, each of them once."""
    found = []
    for connection in list(_made):
        writer = connection._writer
        if writer is not None and writer._loop.is_closed():  # type: ignore[attr-defined]
            found.append(repr(connection))
            _made.discard(connection)
    return found

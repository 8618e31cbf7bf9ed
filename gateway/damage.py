"""What is kept and cannot be read, as somebody else wrote there. Whoever meets it passes it over and says so once."""

from __future__ import annotations

import structlog

from penstock.producer.redis.junk import Guard

_log = structlog.get_logger(__name__)

GUARD = Guard(stays=frozenset({"response", "batch", "file", "progress", "uploaded", "output", "errors"}))
"""What clients keep here stays where it is, whatever it has become. What counts and what lists is made anew."""

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
"""What reading a document raises that is none."""

MAX_TOLD = 1000
_told: dict[str, None] = {}  # keys, the latest last


def tell(key: str) -> None:
    """Has the log name a key that holds what no gateway writes there, once."""
    if key not in _told:
        _log.error("junk_passed_over", key=key)
    _told[key] = _told.pop(key, None)
    if len(_told) > MAX_TOLD:
        del _told[next(iter(_told))]

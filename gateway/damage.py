"""Stored values that cannot be read, as something else wrote them. They are skipped, and logged once."""

from __future__ import annotations

import structlog

from penstock.gateway.once import Once
from penstock.protocol.queue.junk import Guard

_log = structlog.get_logger(__name__)

GUARD = Guard(stays=frozenset({"response", "batch", "file", "progress", "uploaded", "output", "errors"}))
"""Values that clients store here stay where they are, whatever they contain. Counters and lists are rebuilt."""

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
"""Exceptions that reading an invalid document raises."""

_told = Once()  # keys


def tell(key: str) -> None:
    """Logs once that a key holds something no gateway writes there."""
    if _told.is_new(key):
        _log.error("junk_passed_over", key=key)

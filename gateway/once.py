"""Remembers what was logged already, within a bound."""

from __future__ import annotations

from collections.abc import Hashable

MAX_TOLD = 1000


class Once:
    """Things that were told, the latest last. Over `MAX_TOLD` the oldest is forgotten."""

    def __init__(self) -> None:
        self._told: dict[Hashable, None] = {}

    def is_new(self, thing: Hashable) -> bool:
        """Whether a thing should be reported; from now on it counts as reported."""
        is_new = thing not in self._told
        self._told[thing] = self._told.pop(thing, None)
        if len(self._told) > MAX_TOLD:
            del self._told[next(iter(self._told))]
        return is_new

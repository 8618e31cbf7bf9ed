"""Whether the worker can serve, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping


class Readiness:
    """A worker is ready while nothing stands against it. Each part of the service keeps its own objection here."""

    def __init__(self) -> None:
        self._objections: dict[str, str] = {}

    @property
    def is_ready(self) -> bool:
        return not self._objections

    @property
    def objections(self) -> Mapping[str, str]:
        """What stands against serving, by the part that says so."""
        return self._objections

    def object(self, part: str, reason: str) -> None:
        self._objections[part] = reason

    def clear(self, part: str) -> None:
        self._objections.pop(part, None)

"""Whether the worker can serve, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping


class Readiness:
    """A worker is ready while no part of it is not. Each part of the service keeps its own reason here."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    @property
    def is_ready(self) -> bool:
        return not self._reasons

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why the worker is not ready, by part."""
        return self._reasons

    def not_ready(self, part: str, reason: str) -> None:
        self._reasons[part] = reason

    def ready(self, part: str) -> None:
        self._reasons.pop(part, None)

"""Objects built from files that others write while the process runs, such as certificates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Literal, TypeAlias, TypeVar

T = TypeVar("T")
Outcome: TypeAlias = Literal["same", "renewed", "refused"]
_Stamp: TypeAlias = tuple[int, int, int] | None

LOOK_S = 60.0
"""Seconds between two checks."""


async def keep_looking(look: Callable[[], object]) -> None:
    """Calls `look` now and then until cancelled, so that problems are logged before the files are needed."""
    while True:
        await asyncio.sleep(LOOK_S)
        look()


class Renewal(Generic[T]):
    """An object built from files, built again when they change.

    Args:
        files: what to look at, through links.
        make: reads them.

    Attributes:
        value: built from the files as they were last usable.
        error: why the current files can't be used; None: they can.

    Raises:
        OSError, ValueError: as `make`, the first time.
    """

    def __init__(self, files: Sequence[str | Path], make: Callable[[], T]) -> None:
        self._files = files
        self._make = make
        self._seen = self._stamps()
        self.value = make()
        self.error: Exception | None = None

    def look(self, *, is_asked: bool = False) -> Outcome:
        """Rebuilds the value if the files have changed since the last look, or if `is_asked`. Unusable files are
        reported as refused once, and the old value stays.
        """
        seen = self._stamps()  # before they are read: a change meanwhile is seen next time
        if seen == self._seen and not is_asked:
            return "same"
        self._seen = seen
        try:
            self.value = self._make()
        except (OSError, ValueError) as error:
            self.error = error
            return "refused"
        self.error = None
        return "renewed"

    def _stamps(self) -> list[_Stamp]:
        return [_stamp(file) for file in self._files]


def _stamp(file: str | Path) -> _Stamp:
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

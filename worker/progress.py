"""How those who do something long tell how far they are."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is being done)."""


def silent(done: int, total: int, what: str) -> None:
    """A Progress that shows nothing."""


BYTES = "bytes"
"""A unit of it that is shown in kB, MB, ..."""

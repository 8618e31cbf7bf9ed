"""How long operations report their progress."""

from __future__ import annotations

from collections.abc import Callable

ReportProgress = Callable[[int, int, str], None]
"""Called with (done, total, current activity) during a long piece of work.

A total of 0 begins an activity without a count.
"""


def silent(done: int, total: int, what: str) -> None:
    """Shows nothing."""


BYTES = "bytes"
"""The unit that is shown in kB, MB, ..."""

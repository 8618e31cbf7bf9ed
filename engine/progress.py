"""How long operations report their progress."""

from __future__ import annotations

from collections.abc import Callable

ReportProgress = Callable[[int, int, str], None]
"""Called with (done, total, current activity) during a long piece of work.

With a total of 0, an activity begins of which nothing is counted.
"""


def silent(done: int, total: int, what: str) -> None:
    """Shows nothing."""


BYTES = "bytes"
"""The unit that is shown in kB, MB, ..."""

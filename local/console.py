"""Where commands print their output for people."""

from __future__ import annotations

import sys

from rich.console import Console

_UNBOUNDED = 100_000
"""Columns without a terminal: for a file or another program, a row is as long as it needs."""


def console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Returns a console for stdout or stderr. Only a terminal limits the width of a table.

    Args:
        stderr: for progress and anything that is not a result.
        soft_wrap: leaves line breaks to the terminal, so that commands can be copied; not for tables.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNBOUNDED
    return Console(stderr=stderr, soft_wrap=soft_wrap, width=width, highlight=False, emoji=False)

"""Where commands print what is for people."""

from __future__ import annotations

import sys

from rich.console import Console

_UNBOUNDED = 100_000
"""Columns where there is no terminal: a file or the next program takes a row as long as it is."""


def console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Of stdout, or of stderr. Only a terminal bounds the width of a table.

    Args:
        stderr: for progress and what else is no result.
        soft_wrap: leaves it to the terminal to break lines, so that a command in them can be copied; not for tables.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNBOUNDED
    return Console(stderr=stderr, soft_wrap=soft_wrap, width=width, highlight=False, emoji=False)

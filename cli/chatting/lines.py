"""What a person types, or a file holds: one text a turn, of one line or several."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

FENCE = '"""'
PROMPT, MORE = ">>> ", "... "


def texts(read: Callable[[str], str]) -> Iterator[str]:
    """Yields texts until `read`, which gets the prompt to show, raises EOFError. Ctrl-C drops what was typed.

    A text of several lines goes between two lines of three quotation marks, or each of its lines but the last ends in
    a backslash.
    """
    while True:
        try:
            text = _text(read)
        except EOFError:
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            continue
        if text.strip():
            yield text


def reader() -> Callable[[str], str]:
    """Returns what reads a line: with editing and a history at a terminal, without a prompt elsewhere."""
    if not sys.stdin.isatty():
        return lambda _: _next_line()
    with suppress(ImportError):  # a Python without it; `input` then edits as the terminal does
        importlib.import_module("readline")
    return input


def _next_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _text(read: Callable[[str], str]) -> str:
    line = read(PROMPT)
    if line.lstrip().startswith(FENCE):
        return _fenced(line.lstrip().removeprefix(FENCE), read)
    lines = []
    while line.endswith("\\"):
        lines.append(line.removesuffix("\\"))
        line = read(MORE)
    return "\n".join([*lines, line])


def _fenced(line: str, read: Callable[[str], str]) -> str:
    lines = []
    while not line.rstrip().endswith(FENCE):
        lines.append(line)
        line = read(MORE)
    lines.append(line.rstrip().removesuffix(FENCE))
    return "\n".join(lines).strip("\n")

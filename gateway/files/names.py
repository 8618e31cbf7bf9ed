"""What a file is called: a name that any system can take, whatever its client sent."""

from __future__ import annotations

import re
from unicodedata import category

MAX_NAME_BYTES = 255
"""Of UTF-8, as file systems have it."""

NO_NAME = "file"

_SEPARATOR = re.compile(r"[/\\]")
_JOINERS = "\u200c\u200d"  # which words and emoji of some scripts are spelled with
_UNSHOWN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Controls, marks that turn the direction of what follows, line and paragraph separators."""


def file_name(sent: str) -> str:
    """The last part of the path that was sent, without what is not shown, and without dots and spaces around it.

    It has 1 to `MAX_NAME_BYTES` bytes; `NO_NAME` where nothing is left.
    """
    shown = "".join(char for char in sent if char in _JOINERS or category(char) not in _UNSHOWN)
    name = _SEPARATOR.split(shown)[-1].strip(" .")
    return name.encode()[:MAX_NAME_BYTES].decode(errors="ignore").rstrip(" .") or NO_NAME

"""Names of files, made safe for any system, whatever the client sent."""

from __future__ import annotations

import re
from unicodedata import category

MAX_NAME_BYTES = 255
"""Limit in bytes of UTF-8, as in file systems."""

NO_NAME = "file"

_SEPARATOR = re.compile(r"[/\\]")
_JOINERS = "\u200c\u200d"  # which some scripts need in words and emoji
_UNSHOWN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Controls, marks that change the direction of text, line and paragraph separators."""


def file_name(sent: str) -> str:
    """Returns the last part of the path sent, without invisible characters, and without dots and spaces around it.

    It has 1 to `MAX_NAME_BYTES` bytes; `NO_NAME` if nothing is left.
    """
    shown = "".join(char for char in sent if char in _JOINERS or category(char) not in _UNSHOWN)
    name = _SEPARATOR.split(shown)[-1].strip(" .")
    return name.encode()[:MAX_NAME_BYTES].decode(errors="ignore").rstrip(" .") or NO_NAME

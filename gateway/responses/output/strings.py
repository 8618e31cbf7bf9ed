"""Strings of a JSON document, read as they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_CHARACTERS = re.compile(
    r"""(?:
        [^"\\] | \\[^u]
        | \\u(?!d[89ab])[0-9a-f]{4}
        | \\ud[89ab][0-9a-f]{2} (?: \\ud[c-f][0-9a-f]{2} | (?=[^\\] | \\[^u] | \\u(?!d[c-f])[0-9a-f]{4}) )
    )*""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
"""Whole characters of a JSON string: no escape or pair of surrogates is torn."""


class StringPart(NamedTuple):
    """The next part of a string. The first part has no text."""

    number: int
    text: str
    is_first: bool = False
    is_last: bool = False


class StringReader:
    """Reads the strings of a document piece by piece. Each of their characters is looked at once.

    Args:
        befores: for each string, what comes between the one before and its opening quote.
    """

    def __init__(self, befores: Iterable[re.Pattern[str]]) -> None:
        self._befores = iter(befores)
        self._before = next(self._befores, None)
        self._is_open = False
        self._number = 0
        self.unread = ""
        """What was written and is not read yet."""

    @property
    def has_begun(self) -> bool:
        """Whether the first string has begun."""
        return self._is_open or self._number > 0

    def take(self, piece: str) -> Iterator[StringPart]:
        """Yields what the next piece of the document adds to the strings."""
        self.unread += piece
        while True:
            if not self._is_open:
                if not self._opens():
                    return
                yield StringPart(self._number, "", is_first=True)
            found = _CHARACTERS.match(self.unread)
            whole = found.group() if found else ""
            self.unread = self.unread[len(whole) :]
            if whole:
                yield StringPart(self._number, _read(whole))
            if not self.unread.startswith('"'):
                return
            self.unread = self.unread[1:]
            self._is_open = False
            yield StringPart(self._number, "", is_last=True)
            self._number += 1
            self._before = next(self._befores, None)

    def _opens(self) -> bool:
        """Reads what is before the next string; returns whether that begins."""
        found = self._before.match(self.unread) if self._before is not None else None
        if found is not None:
            self.unread = self.unread[found.end() :]
            self._is_open = True
        return self._is_open


def _read(spelled: str) -> str:
    """Returns the text of whole characters of a JSON string. What is not JSON stays as it is."""
    if "\\" not in spelled:
        return spelled
    try:
        text: str = json.loads(f'"{spelled}"', strict=False)
    except ValueError:
        return spelled
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

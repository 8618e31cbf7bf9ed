"""Reads text that arrives bit by bit, with generators that wait for more of it.

A reading is a generator: it yields at the end of the available text, and resumes when there is more. So its result
after some text is the same however that text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

MAX_NAME_CHARS = 256
MAX_SPACE_CHARS = 1024  # before and within a piece of syntax, which is scanned again with every token

_NAME = re.compile("[^\\s<>{}()\\[\\]\"'=,;\ud800-\udfff]*")
_WORD = re.compile("(\\s*)([\ud800-\udfff]|[^\\s\ud800-\udfff]+)")


class Malformed(Exception):
    """The text is not what is being read, or it ends too early."""


class TextCursor:
    """A text and the place up to which it has been read."""

    __slots__ = ("_has_ended", "_settled", "is_cut_off", "is_whole", "place", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        self._settled = 0  # text before this will not be read again
        self._has_ended = False
        self.is_whole = False  # whether the text has ended by itself: nothing more was to come
        self.is_cut_off = False  # whether a reading waited for more text after the end

    def push(self, text: str) -> None:
        self.text += text

    def end(self, *, is_whole: bool = False) -> None:
        """Ends the text: a reading that waits for more raises Malformed."""
        self._has_ended = True
        self.is_whole = is_whole

    def settle(self) -> None:
        """Commits what has been read: it will not be read again as anything else."""
        self._settled = self.place

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def rewind(self) -> None:
        """Goes back to where the text is settled."""
        self.place = self._settled

    def rest(self) -> str:
        return self.text[self.place :]

    def unsettled(self) -> str:
        return self.text[self._settled :]

    def more(self) -> Reading[None]:
        if self._has_ended:
            self.place = len(self.text)
            self.is_cut_off = True
            raise Malformed
        if self._settled:
            self.text = self.text[self._settled :]
            self.place -= self._settled
            self._settled = 0
        yield

    def take(self, count: int) -> str:
        start = self.place
        self.place += count
        return self.text[start : self.place]

    def peek(self) -> Reading[str]:
        while self.place == len(self.text):
            yield from self.more()
        return self.text[self.place]

    def skip_space(self) -> Reading[str]:
        """Returns the next character that is not white space."""
        while (character := (yield from self.peek())).isspace():
            self.place += 1
        return character

    def next_or_end(self) -> Reading[str]:
        """Skips white space; returns the next character, or nothing where the text has ended."""
        while not (rest := self.text[self.place :].lstrip()):
            if self._has_ended:
                return ""
            yield from self.more()
        self.place = len(self.text) - len(rest)
        return rest[0]

    def expect(self, *syntaxes: str) -> Reading[int]:
        """Reads one of `syntaxes`, with any white space before it and where it has some; returns its index."""
        while True:
            ends = [self._match(syntax) for syntax in syntaxes]
            for index, end in enumerate(ends):
                if end is not None and end >= 0:
                    self.place = end
                    return index
            if None not in ends:
                raise Malformed
            yield from self.more()

    def sees(self, syntax: str) -> Reading[bool]:
        while (end := self._match(syntax)) is None:
            yield from self.more()
        return end >= 0

    def accept(self, syntax: str) -> Reading[bool]:
        """Reads `syntax` if it is next."""
        try:
            yield from self.expect(syntax)
        except Malformed:
            return False
        return True

    def until(self, word: str, max_chars: int | None = None) -> Reading[str]:
        """Reads the text up to `word`, but not `word`. Raises Malformed if it is longer than `max_chars`."""
        seen = self.place
        while (end := self.text.find(word, seen)) < 0:
            first = self.place
            seen = max(first, len(self.text) - len(word) + 1)  # `word` does not begin before this
            _check_length(seen - first, max_chars)
            yield from self.more()
            seen += self.place - first
        _check_length(end - self.place, max_chars)
        return self.take(end - self.place)

    def run(self, characters: re.Pattern[str], max_chars: int | None = None) -> Reading[str]:
        """Returns the longest run of `characters` from here without reading it; it ends where others follow."""
        seen = self.place
        while (end := self._end_of(characters, seen)) == len(self.text):
            _check_length(end - self.place, max_chars)
            first = self.place
            yield from self.more()
            seen = end + self.place - first
        _check_length(end - self.place, max_chars)
        return self.text[self.place : end]

    def name(self) -> Reading[str]:
        """Reads the name of a function, or of one of its arguments."""
        yield from self.skip_space()
        name = yield from self.run(_NAME, MAX_NAME_CHARS)
        if not name:
            raise Malformed
        return self.take(len(name))

    def _end_of(self, characters: re.Pattern[str], start: int) -> int:
        match = characters.match(self.text, start)
        return start if match is None else match.end()

    def _match(self, syntax: str) -> int | None:
        """Returns where `syntax` ends if it is next, None if more text is needed to tell, or -1 if it is not next."""
        place = self.place
        for may_have_space, word in _words(syntax):
            while may_have_space and self.text[place : place + 1].isspace():
                place += 1
            if place - self.place > MAX_SPACE_CHARS:
                return -1
            if not self.text.startswith(word, place):
                return None if word.startswith(self.text[place:]) else -1
            place += len(word)
        return place


def _check_length(count: int, max_chars: int | None) -> None:
    if max_chars is not None and count > max_chars:
        raise Malformed


@lru_cache(maxsize=256)
def _words(syntax: str) -> tuple[tuple[bool, str], ...]:
    """Splits `syntax` into words and whether white space may precede each: it may around a special token."""
    words: list[tuple[bool, str]] = []
    is_behind_token = True
    for space, word in _WORD.findall(syntax):
        is_token = "\ud800" <= word <= "\udfff"
        words.append((bool(space) or is_token or is_behind_token, word))
        is_behind_token = is_token
    return tuple(words)

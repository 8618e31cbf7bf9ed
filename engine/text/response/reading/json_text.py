"""Reads JSON as it arrives: its text is passed on as soon as it is known to be valid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from penstock.engine.text.response.reading.delta import DELIMITER
from penstock.engine.text.response.reading.source import Malformed, Reading, TextCursor

Emit = Callable[[str], object]
Mend = Callable[[], object]  # notes that a flaw was mended

MAX_SCALAR_CHARS = 4096

_SPACE = " \t\n\r"
_PLAIN = re.compile('[^"\\\\\x00-\x1f\ud800-\udfff]+')
_SCALAR = re.compile(r"[-+.\w]*", re.ASCII)
_IS_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')


def to_json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if DELIMITER.search(text) else text


def read_value(source: TextCursor, emit: Emit, mend: Mend | None = None) -> Reading[None]:
    """Reads a JSON value. A control character within a string, which JSON does not allow, is emitted as its escape.

    With `mend`, a backslash that escapes nothing is emitted as one that is escaped.
    """
    closers: list[str] = []
    while True:
        yield from _space(source, emit)
        opener = yield from source.peek()
        if opener in "{[":
            emit(source.take(1))
            closer = "}" if opener == "{" else "]"
            yield from _space(source, emit)
            if (yield from source.peek()) != closer:
                closers.append(closer)
                if opener == "{":
                    yield from _key(source, emit, mend)
                continue
            emit(source.take(1))
        elif opener == '"':
            yield from read_string(source, emit, mend)
        else:
            yield from _scalar(source, emit)
        if not (yield from _next_value(source, emit, closers, mend)):
            return


def read_string(source: TextCursor, emit: Emit, mend: Mend | None = None) -> Reading[None]:
    if (yield from source.peek()) != '"':
        raise Malformed
    emit(source.take(1))
    while True:
        if plain := _PLAIN.match(source.text, source.place):
            emit(source.take(len(plain[0])))
        character = yield from source.peek()
        if character == '"':
            emit(source.take(1))
            return
        if character == "\\":
            yield from _escape(source, emit, mend)
        elif character < " ":
            emit(json.dumps(source.take(1))[1:-1])
        elif DELIMITER.match(character):
            raise Malformed


def read_text(source: TextCursor) -> Reading[str]:
    """Reads a string and returns its value."""
    parts: list[str] = []
    yield from read_string(source, parts.append)
    return str(json.loads("".join(parts)))


def _next_value(source: TextCursor, emit: Emit, closers: list[str], mend: Mend | None) -> Reading[bool]:
    """Reads on after a value, up to the next one; returns whether there is one."""
    while closers:
        yield from _space(source, emit)
        character = yield from source.peek()
        if character not in (",", closers[-1]):
            raise Malformed
        emit(source.take(1))
        if character == ",":
            if closers[-1] == "}":
                yield from _key(source, emit, mend)
            return True
        closers.pop()
    return False


def _key(source: TextCursor, emit: Emit, mend: Mend | None) -> Reading[None]:
    yield from _space(source, emit)
    yield from read_string(source, emit, mend)
    yield from _space(source, emit)
    if (yield from source.peek()) != ":":
        raise Malformed
    emit(source.take(1))


def _space(source: TextCursor, emit: Emit) -> Reading[None]:
    while (yield from source.peek()) in _SPACE:
        emit(source.take(1))


def _scalar(source: TextCursor, emit: Emit) -> Reading[None]:
    """Reads a number or a word, which is known to be one only at its end."""
    text = yield from source.run(_SCALAR, MAX_SCALAR_CHARS)
    if not _IS_SCALAR.fullmatch(text):
        raise Malformed
    emit(source.take(len(text)))


def _escape(source: TextCursor, emit: Emit, mend: Mend | None) -> Reading[None]:
    while not (match := _ESCAPE.match(source.text, source.place)):
        seen = source.text[source.place : source.place + 6]
        if re.fullmatch(r"\\(u[0-9a-fA-F]{0,3})?", seen):
            yield from source.more()
            continue
        if mend is None:
            raise Malformed
        mend()
        emit(source.take(1) * 2)
        return
    emit(source.take(len(match[0])))

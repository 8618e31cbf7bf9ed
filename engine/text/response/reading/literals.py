"""Reads values that are not JSON: Python's, and those with bare keys and their own quotes."""

from __future__ import annotations

import math
import re

from penstock.engine.text.response.reading.delta import DELIMITER
from penstock.engine.text.response.reading.json_text import read_text
from penstock.engine.text.response.reading.source import Malformed, Reading, TextCursor

MAX_DEPTH = 64

_CLOSERS = {"[": "]", "(": ")"}
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_WORD = re.compile("[^,:\\[\\](){}\"'\ud800-\udfff]*")
_PLAIN = {end: re.compile(f"[^\\\\{end}\ud800-\udfff]+") for end in "'\""}  # within a Python string
_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_ESCAPED = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])", re.DOTALL)
_MAX_ESCAPE_CHARS = 10
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""} | {
    character: character for character in "\\'\""
}


def whole_literal(text: str) -> object:
    """Returns the value that a whole text spells as Python does. Raises Malformed if it spells none."""
    source = TextCursor(text)
    source.push("\n")  # so that a number at the end is known to be complete
    source.end()
    reading = read_literal(source)
    try:
        while True:
            next(reading)
    except StopIteration as ended:
        if source.rest().strip():
            raise Malformed from None
        value: object = ended.value
        return value


def read_literal(source: TextCursor, quote: str = "", depth: int = 0) -> Reading[object]:
    """Reads a value: Python's or, with a `quote`, one with strings between two of these and words as strings."""
    if depth > MAX_DEPTH:
        raise Malformed
    character = yield from source.skip_space()
    if character == "{":
        return (yield from _mapping(source, quote, depth))
    if character in _CLOSERS:
        return (yield from _list(source, quote, depth))
    if (yield from _is_string(source, quote)):
        return (yield from _string(source, quote))
    return _scalar((yield from _word(source)), are_words_text=bool(quote))


def read_key(source: TextCursor, quote: str) -> Reading[str]:
    """Reads the key of a mapping. Python's keys are strings; others may be bare."""
    yield from source.skip_space()
    if (yield from _is_string(source, quote)):
        return (yield from _string(source, quote))
    if not quote:
        raise Malformed
    return (yield from _word(source))


def _mapping(source: TextCursor, quote: str, depth: int) -> Reading[dict[str, object]]:
    source.place += 1
    found: dict[str, object] = {}
    while not (yield from source.accept("}")):
        key = yield from read_key(source, quote)
        yield from source.expect(":")
        found[key] = yield from read_literal(source, quote, depth + 1)
        yield from source.accept(",")
    return found


def _list(source: TextCursor, quote: str, depth: int) -> Reading[list[object]]:
    closer = _CLOSERS[source.take(1)]
    found: list[object] = []
    while not (yield from source.accept(closer)):
        found.append((yield from read_literal(source, quote, depth + 1)))
        yield from source.accept(",")
    return found


def _is_string(source: TextCursor, quote: str) -> Reading[bool]:
    character = yield from source.peek()
    if not quote:
        return character in "'\""
    return character == '"' or (yield from source.sees(quote))


def _string(source: TextCursor, quote: str) -> Reading[str]:
    character = yield from source.peek()
    if not quote:
        return (yield from _python_string(source))
    if character == '"' and not quote.startswith('"'):
        return (yield from read_text(source))
    yield from source.expect(quote)
    text = yield from source.until(quote)
    yield from source.expect(quote)
    return DELIMITER.sub("", text)


def _python_string(source: TextCursor) -> Reading[str]:
    end = source.take(1)
    parts: list[str] = []
    while (character := (yield from source.peek())) != end:
        if DELIMITER.match(character):
            raise Malformed
        plain = _PLAIN[end].match(source.text, source.place)
        parts.append((yield from _escaped(source)) if plain is None else source.take(len(plain[0])))
    source.place += 1
    return "".join(parts)


def _escaped(source: TextCursor) -> Reading[str]:
    while not (match := _ESCAPED.match(source.text, source.place)):
        if len(source.text) - source.place >= _MAX_ESCAPE_CHARS:
            raise Malformed
        yield from source.more()
    code = match[1]
    source.place = match.end()
    if code[0] in "xuU" and len(code) > 1:
        return _character(int(code[1:], 16))
    return _ESCAPES.get(code, match[0])


def _character(code: int) -> str:
    try:
        return chr(code)
    except (ValueError, OverflowError):
        raise Malformed from None


def _word(source: TextCursor) -> Reading[str]:
    word = yield from source.run(_WORD)
    return source.take(len(word)).strip()


def _scalar(word: str, *, are_words_text: bool) -> object:
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return _number(word)
    if not are_words_text or not word:
        raise Malformed
    return word


def _number(word: str) -> object:
    try:
        return int(word)
    except ValueError:
        number = float(word)
    if not math.isfinite(number):
        raise Malformed
    return number

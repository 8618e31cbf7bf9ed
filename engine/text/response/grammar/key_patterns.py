"""Removes patterns of `patternProperties` that match no names but those listed in `properties`.

For such a schema, llguidance offers a comma that nothing can follow. Here each such name gets both schemas, and the
pattern is removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice, product
from typing import Any

# Python has no other parser of patterns. A pattern that it can't read, or reads in another way, stays as it is.
_parser: Any = re._parser  # noqa: SLF001
_ops: Any = re._constants  # noqa: SLF001

_BEGIN, _END = "\ud800", "\udfff"  # stand for anchors: no pattern can match a lone surrogate
_ANCHORS = {_ops.AT_BEGINNING: _BEGIN, _ops.AT_END: _END}
_MAX_TIMES = 64
_MAX_CHARACTERS = 256


def with_listed_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema with the same values, in which no pattern has only listed names."""
    known, patterns = schema.get("properties"), schema.get("patternProperties")
    if not isinstance(known, dict) or not isinstance(patterns, dict):
        return schema
    used = [pattern for pattern in patterns if _has_only(pattern, known)]
    if not used:
        return schema
    listed = {
        name: _both(each, [patterns[one] for one in used if re.search(one, name)]) for name, each in known.items()
    }
    left = {pattern: each for pattern, each in patterns.items() if pattern not in used}
    made = {key: value for key, value in schema.items() if key != "patternProperties"} | {"properties": listed}
    return made | ({"patternProperties": left} if left else {})


def _both(schema: object, more: list[object]) -> object:
    return {"allOf": [schema, *more]} if more else schema


def _has_only(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern matches nothing but these names. False if that is hard to say."""
    known = {_BEGIN + name + _END for name in names}
    try:
        found = list(islice(_texts(_parser.parse(pattern)), 4 * len(known) + 4))
    except (re.error, NotImplementedError, RecursionError, OverflowError):
        return False
    return len(found) <= 4 * len(known) + 3 and known.issuperset(found)


def _texts(parsed: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    """Yields the texts that a part of a pattern matches, some perhaps twice. Raises NotImplementedError for most."""
    return map("".join, product(*[_Again(op, argument) for op, argument in parsed]))


class _Again:
    """The texts of one element of a pattern."""

    def __init__(self, op: Any, argument: Any) -> None:
        self._op, self._argument = op, argument

    def __iter__(self) -> Iterator[str]:
        op, argument = self._op, self._argument
        if op is _ops.AT and argument in _ANCHORS:
            return iter((_ANCHORS[argument],))
        if op is _ops.LITERAL:
            return iter((chr(argument),))
        if op is _ops.IN:
            return chain.from_iterable(_characters(*each) for each in argument)
        if op is _ops.BRANCH:
            return chain.from_iterable(map(_texts, argument[1]))
        if op is _ops.SUBPATTERN and not (argument[1] or argument[2]):
            return _texts(argument[3])
        if op in (_ops.MAX_REPEAT, _ops.MIN_REPEAT) and argument[1] <= _MAX_TIMES:
            least, most, part = argument
            return chain.from_iterable(_texts(list(part) * times) for times in range(least, most + 1))
        raise NotImplementedError


def _characters(op: Any, argument: Any) -> Iterable[str]:
    if op is _ops.LITERAL:
        return (chr(argument),)
    if op is _ops.RANGE and argument[1] - argument[0] < _MAX_CHARACTERS:
        return map(chr, range(argument[0], argument[1] + 1))
    raise NotImplementedError

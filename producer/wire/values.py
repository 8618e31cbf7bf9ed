"""Values that several parts of a request are made of, and the base of its models."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

_MAX_SUGGESTED = 64  # characters of an unknown name that is compared with ours

MAX_NESTING = 64
"""Of lists and objects within each other in one JSON value: what JSON schemas have, and no recursion runs out at."""

_HARMLESS = frozenset({int, bool, type(None)})
"""A long list of them is looked at all at once: one by one it would take seconds."""


class WireModel(BaseModel):
    """A part of a request. A field that it does not know is refused, with the name that was probably meant.

    Null is the same as leaving a field out, as in OpenAI's API.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, serialize_by_alias=True)

    other_names: ClassVar[Mapping[str, str]] = {}  # that clients of other servers use, to ours

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: object) -> object:
        if type(values) is dict and values.keys() <= _names(cls) and _PLAIN.issuperset(map(type, values.values())):
            return values  # nearly always
        if not isinstance(values, Mapping):
            return values
        given = {name: value for name, value in values.items() if value is not None}
        for name, value in given.items():
            if isinstance(value, _NEVER):
                raise ValueError(f"{shown(str(name))}: must not be {spelled(value)}")  # noqa: TRY004  as pydantic has it
        for other, name in cls.other_names.items():
            if other in given:
                _rename(given, other, name)
        if not given.keys() <= _names(cls):
            unknown = [name for name in given if name not in _names(cls)][:5]
            ours = [field.alias or name for name, field in cls.model_fields.items()]
            raise ValueError("; ".join(unknown_field(name, [*ours, *cls.other_names]) for name in unknown))
        return given


@cache
def _names(model: type[WireModel]) -> frozenset[str]:
    return frozenset(name for field in model.model_fields.items() for name in (field[0], field[1].alias) if name)


def no_boolean(value: object) -> object:
    """For numbers: true would be 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "must be a number")
    return value


def from_json(value: object) -> object:
    """Flat entries carry lists and maps as JSON text."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from error
    return value


def texts_or_text(value: object) -> object:
    """For fields that take a list of strings or one of them.

    Raises:
        PydanticCustomError: it is neither.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list | tuple):
        return value
    raise PydanticCustomError("texts_type", "must be a string or a list of strings")


def check_json(value: object) -> Any:
    """A JSON value whose text is Unicode, that is not nested too deeply and whose numbers JSON can spell.

    Raises:
        ValueError: the message says what is wrong with it.
    """
    level: list[object] = [value]
    for _ in range(MAX_NESTING):
        level = _inside(level)
        if not level:
            return value
    if any(isinstance(inner, Mapping | list | tuple) for inner in level):
        raise ValueError(f"is nested more than {MAX_NESTING} deep")
    _inside(level)
    return value


def check_text(text: str) -> str:
    """JSON can spell half of a character (a lone surrogate), which no tokenizer and no UTF-8 stream takes."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"is not Unicode text: {error.reason} at character {error.start}") from None
    return text


def shown(text: str) -> str:
    """Text from outside, fit for one line of an error message."""
    return text if text.isprintable() and len(text) <= 80 else repr(text)[:80]


def unknown_field(name: object, known: Iterable[str]) -> str:
    """What is said of a field that does not exist, with the name that was probably meant."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6) if _may_be_ours(name) else ()
    return f"unknown field {shown(str(name))}{f', did you mean {near[0]}?' if near else ''}"


def explain(error: Exception, called: Mapping[str, str] = MappingProxyType({})) -> str:
    """One line that names each offending field; pydantic's own text spans many and links to its website.

    Args:
        error: of reading a request.
        called: what the caller calls a field, where that is not our name.
    """
    if not isinstance(error, ValidationError):
        return f"the request is nested too deeply: {error}"
    items = error.errors(include_url=False, include_context=False)[:5]
    return "; ".join(_explained(item, called) for item in items)


def _explained(item: ErrorDetails, called: Mapping[str, str]) -> str:
    """Objects and lists are not spelled out: they may hold a prompt."""
    says = item["msg"].removeprefix("Value error, ")
    for word, ours in _WORDS.items():
        says = says.replace(word, ours)
    given = "" if item["type"] in _SAYS_IT_ALL else f", not {spelled(item['input'])}"
    first, inner = item["loc"][:1], item["loc"][1:]
    place = place_of([*(called.get(name, name) for name in map(str, first)), *inner])
    if not place and _NAMED.match(says):
        return says
    return f"{place or 'request'}: {says}{given}"


def place_of(loc: Sequence[int | str]) -> str:
    """As `messages[0].role`; what a validator adds to a place, such as the branch of a union, is left out."""
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part not in _BRANCHES and _BRANCH.fullmatch(part) is None:
            place += f".{shown(part)}" if place else shown(part)
    return place


def spelled(value: object) -> str:
    """As JSON spells it, as far as that is a word."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping | list | tuple):
        return json_kind(value)
    return in_python(value)


def in_python(value: object) -> str:
    """As Python shows it, as far as that is one line; its type, if it is not."""
    if isinstance(value, int) and value.bit_length() > _MAX_SPELLED_BITS:
        return f"a number of {value.bit_length()} bits"
    try:
        text = f"{value!r:.80}"
    except Exception:  # of a number too long for Python, or by whoever wrote the class
        text = "\n"
    return text if text.isprintable() else f"a {type(value).__name__}"


def json_kind(value: object) -> str:
    """What JSON calls it, with its article."""
    kinds = {bool: "a boolean", Mapping: "an object", list | tuple: "a list", str: "a string", int | float: "a number"}
    return (
        "null" if value is None else next((name for kind, name in kinds.items() if isinstance(value, kind)), "a value")
    )


_SAYS_IT_ALL = frozenset({"value_error", "missing", "too_short", "too_long", "extra_forbidden"})
"""Kinds of errors whose message names what was given, or that nothing was."""

_WORDS = {
    " after validation": "", "Tuple should": "List should", "Dictionary should": "Object should",
    "valid tuple": "valid list", "valid dictionary": "valid object",
}  # fmt: skip
"""Of Python, to what JSON has."""

_NAMED = re.compile(r"[a-z_.]+: ")
"""What is said of a field by who looks at several."""

_BRANCHES = frozenset({"str", "int", "float", "bool", "[key]"})
_BRANCH = re.compile(r"<.*>|(list|dict|tuple)\[.*\]")
"""Of unions: the library's names, and the tags of ours."""

_MAX_SPELLED_BITS = 256

_PLAIN = frozenset({str, int, float, bool, list, tuple, dict})
"""What nearly all values are."""

_NEVER = (bytes, bytearray, memoryview, Iterator)
"""What has no one meaning, or can be read just once, though a request is sent as often as it takes."""

FAIL_FAST: Any = Field(fail_fast=True)
"""Of every list: all the mistakes of a long one would cost more than all else, and the first says enough."""

Text = Annotated[str, Strict(), AfterValidator(check_text)]
JsonObject = Annotated[dict[str, Any], BeforeValidator(check_json), BeforeValidator(from_json)]
FunctionName = Annotated[str, Strict(), Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


def _inside(level: Iterable[object]) -> list[object]:
    """What the values of a level hold. A body of 1 MB may have some hundred thousand, most of them empty or small."""
    inner: list[object] = []
    for value in level:
        if isinstance(value, str):
            check_text(value)
        elif isinstance(value, (list, tuple)):
            if value and set(map(type, value)) - _HARMLESS:
                inner.extend(value)
        elif isinstance(value, dict) or isinstance(value, Mapping):  # noqa: SIM101  the first is quick, and nearly always
            inner.extend(value)
            inner.extend(value.values())
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise ValueError(f"holds {value}, which JSON has no number for")
        elif value is not None and not isinstance(value, int):
            raise ValueError(f"holds {shown(repr(value))}, which is no JSON value")
    return inner


def _rename(values: dict[Any, Any], other: str, ours: str) -> None:
    value = values.pop(other)
    if ours not in values:
        values[ours] = value
    elif not _is_same(values[ours], value):
        raise ValueError(f"{ours} and {other} are the same, but given as {spelled(values[ours])} and {spelled(value)}")


def _is_same(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # what cannot be compared is no value of ours
        return False


def _may_be_ours(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and len(name) <= _MAX_SUGGESTED

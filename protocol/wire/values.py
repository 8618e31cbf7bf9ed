"""Value types shared by several parts of a request, and the base class of its models."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, islice
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
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

_MAX_SUGGESTED = 64  # longer unknown names are not compared with ours

MAX_NESTING = 64
"""Depth limit of lists and objects in one JSON value: as deep as JSON schemas go, and safe for recursion."""

_HARMLESS = frozenset({int, bool, type(None)})
"""A long list of these is checked at once: one by one it would take seconds."""


class WireModel(BaseModel):
    """Part of a request. An unknown field is refused, with the name that was probably meant.

    Null means the same as leaving a field out, as in OpenAI's API.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, serialize_by_alias=True)

    other_names: ClassVar[Mapping[str, str]] = {}  # maps names that other servers' clients use to ours

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
    """Rejects booleans for numbers, as true would be 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "must be a number")
    return value


def from_json(value: object) -> object:
    """Reads lists and maps that flat entries carry as JSON text."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from error
    return value


def texts_or_text(value: object) -> object:
    """Validates a field that takes a string or a list of strings.

    Raises:
        PydanticCustomError: it is neither.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list | tuple):
        return value
    raise PydanticCustomError("texts_type", "must be a string or a list of strings")


def check_json(value: object) -> Any:
    """Returns a JSON value after checking that its text is Unicode, its nesting is limited, and JSON can spell its
    numbers.

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
    """Rejects half a character (a lone surrogate), which JSON can spell but no tokenizer or UTF-8 stream accepts."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"is not Unicode text: {error.reason} at character {error.start}") from None
    return text


def shown(text: str) -> str:
    """Escapes text from outside for one line of an error message."""
    return text if text.isprintable() and len(text) <= 80 else repr(text)[:80]


def unknown_field(name: object, known: Iterable[str]) -> str:
    """Returns the message about a field that does not exist, with the name that was probably meant."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6) if _may_be_ours(name) else ()
    return f"unknown field {shown(str(name))}{f', did you mean {near[0]}?' if near else ''}"


def explain(error: Exception, called: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns one line that names each offending field; pydantic's own text spans many and links to its website.

    Args:
        error: raised while reading a request.
        called: the caller's names for fields, where they differ from ours.
    """
    if not isinstance(error, ValidationError):
        return f"the request is nested too deeply: {error}"
    items = error.errors(include_url=False, include_context=False)[:5]
    return "; ".join(_explained(item, called) for item in items)


def _explained(item: ErrorDetails, called: Mapping[str, str]) -> str:
    """Explains one error. Objects and lists are not spelled out, as they may hold a prompt."""
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
    """Returns a path such as `messages[0].role`, without what a validator adds, such as the branch of a union."""
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part not in _BRANCHES and _BRANCH.fullmatch(part) is None:
            place += f".{shown(part)}" if place else shown(part)
    return place


def spelled(value: object) -> str:
    """Returns a value as JSON spells it, if that is a single word."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping | list | tuple):
        return json_kind(value)
    return in_python(value)


def in_python(value: object) -> str:
    """Returns a value as Python shows it, if that fits on one line; otherwise its type."""
    if isinstance(value, int) and value.bit_length() > _MAX_SPELLED_BITS:
        return f"a number of {value.bit_length()} bits"
    try:
        text = f"{value!r:.80}"
    except Exception:  # a number too long for Python, or a class with a broken repr
        text = "\n"
    return text if text.isprintable() else f"a {type(value).__name__}"


def json_kind(value: object) -> str:
    """Returns JSON's name for a value's type, with an article."""
    kinds = {bool: "a boolean", Mapping: "an object", list | tuple: "a list", str: "a string", int | float: "a number"}
    return (
        "null" if value is None else next((name for kind, name in kinds.items() if isinstance(value, kind)), "a value")
    )


_SAYS_IT_ALL = frozenset({"value_error", "missing", "too_short", "too_long", "extra_forbidden"})
"""Kinds of errors whose message already names the value, or that have none."""

_WORDS = {
    " after validation": "", "Tuple should": "List should", "Dictionary should": "Object should",
    "valid tuple": "valid list", "valid dictionary": "valid object",
}  # fmt: skip
"""Maps Python's terms to JSON's."""

_NAMED = re.compile(r"[a-z_.]+: ")
"""Prefix of an error about one field, from a validator that checks several."""

_BRANCHES = frozenset({"str", "int", "float", "bool", "[key]"})
_BRANCH = re.compile(r"<.*>|(list|dict|tuple)\[.*\]")
"""Branches of unions: the library's names, and our tags."""

_MAX_SPELLED_BITS = 256

_PLAIN = frozenset({str, int, float, bool, list, tuple, dict})
"""The types of nearly all values."""

_NEVER = (bytes, bytearray, memoryview, Iterator)
"""Types that have no single meaning, or that can be read just once, although a request may be sent repeatedly."""

FAIL_FAST: Any = Field(fail_fast=True)
"""For every list: collecting all mistakes of a long one would cost more than everything else, and the first is
enough.
"""

Text = Annotated[str, Strict(), AfterValidator(check_text)]
FilledText = Annotated[Text, Field(min_length=1)]
JsonObject = Annotated[dict[str, Any], BeforeValidator(check_json), BeforeValidator(from_json)]
Int = Annotated[int, BeforeValidator(no_boolean)]
Float = Annotated[float, BeforeValidator(no_boolean)]
FunctionName = Annotated[str, Strict(), Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


def _one_or_many(value: object) -> object:
    """Accepts one plain string for `stop`; text that begins with `[` is a JSON list."""
    if isinstance(value, str):
        return from_json(value) if value.startswith("[") else [value]
    return texts_or_text(value)


def piece_by_piece(value: object, validate: ValidatorFunctionWrapHandler) -> Any:
    """Acts like FAIL_FAST, which maps do not have."""
    if not isinstance(value, Mapping):
        return validate(value)
    items = iter(value.items())
    made = validate({})
    _only_numbers(chain(value, value.values()))
    while piece := dict(islice(items, _PIECE)):
        made |= validate(piece)
    return made


def _in_pieces(value: object, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validates a long list in pieces: one call would block all other threads, a tenth of a second for 500,000
    numbers.
    """
    if not isinstance(value, Collection) or isinstance(value, str | Mapping):
        return validate(value)
    ids = value if isinstance(value, (list, tuple)) else tuple(value)
    _only_numbers(ids)
    if len(ids) <= _LONG_PIECE:
        return validate(ids)
    try:
        pieces = [validate(ids[start : start + _LONG_PIECE]) for start in range(0, len(ids), _LONG_PIECE)]
    except ValidationError:
        return validate(ids)  # its error says where
    return tuple(chain.from_iterable(pieces))


def _only_numbers(values: Iterable[object]) -> None:
    """Rejects booleans, which would be 0 and 1, and bytes, which would be read as text. A million takes some 10 ms."""
    if wrong := _NO_NUMBERS.intersection(map(type, values)):
        raise ValueError(f"holds a {min(kind.__name__ for kind in wrong)}, where only numbers are allowed")


def _inside(level: Iterable[object]) -> list[object]:
    """Returns the children of a level's values. A body of 1 MB may have some hundred thousand, most of them empty or
    small.
    """
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
            raise ValueError(f"holds {shown(repr(value))}, which is not a JSON value")
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
    except Exception:  # something that cannot be compared is not a value of ours
        return False


def _may_be_ours(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and len(name) <= _MAX_SUGGESTED


_NO_NUMBERS = frozenset({bool, bytes})
_PIECE = 256
_LONG_PIECE = 4096

TokenId = Annotated[int, Field(ge=0, lt=2**63)]
TokenIds = Annotated[tuple[TokenId, ...], FAIL_FAST, WrapValidator(_in_pieces), BeforeValidator(from_json)]
Texts = Annotated[tuple[FilledText, ...], FAIL_FAST, BeforeValidator(_one_or_many)]

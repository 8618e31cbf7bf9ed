"""Edits JSON schemas for llguidance: narrows what it gets wrong, and removes what it does not need."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.response.grammar.key_patterns import with_listed_names
from penstock.engine.text.response.grammar.numbers import KEYWORDS, is_number

Schema = dict[str, Any]

# Allowed before and after a bracket, a colon or a comma: a few spaces, or a new line and its indentation. Not more,
# since a model may never stop.
WHITE_SPACE = r" {1,2}|\n[ \t]{0,24}"

# Formats in JSON Schema's drafts. By the standard, any other is a comment.
FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uuid",
     "uri", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex")
)  # fmt: skip
_ESCAPES = 'nrbtf\\"'  # without \uXXXX: that spells only control characters, which patterns disagree about
_CONTROL_ESCAPE = re.compile(r"\\u00(?:[01]|7f)")
LEAP_YEAR = "[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00"
_REAL_DAY = f"(?:[0-9]{{4}}-(?:0[13-9]|1[0-2])-|[0-9]{{4}}-02-(?:[01][0-9]|2[0-8])|(?:{LEAP_YEAR})-02-29)"
_REAL_DATE = ("^0*[1-9]", f"^{_REAL_DAY}")  # excludes the year 0, which few calendars have
_NO_LEAP_SECOND = "^[^:]*:[^:]*:[0-5]"
_CAPITALS = "^[^tz]*$"  # RFC 3339 allows others, and many parsers do not
# llguidance lets through what validators refuse: 29 February in any year, the year 0, leap seconds at any minute.
_NARROWER: dict[str, tuple[str, ...]] = {
    "date": _REAL_DATE,
    "date-time": (*_REAL_DATE, _NO_LEAP_SECOND, _CAPITALS),
    "time": (_NO_LEAP_SECOND, _CAPITALS),
}
_LARGEST = 10**15
_MAX_STEPS = 256  # of a reference; no schema is nested this deeply
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")

_IN_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems")  # fmt: skip
_IN_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_IN_MAP = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DEFINITIONS = frozenset(("$defs", "definitions"))
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_LENGTHS = frozenset(("minLength", "maxLength", "minItems", "maxItems"))
_KINDS: dict[str, type | tuple[type, ...]] = {
    "required": (list, bool),  # a boolean is from Draft 3, in the property itself
    "pattern": str,
    "enum": list,
    "anyOf": list,
    "oneOf": list,
    "allOf": list,
    "properties": dict,
    "patternProperties": dict,
    "$defs": dict,
    "definitions": dict,
    "items": (dict, bool, list),
    "additionalProperties": (dict, bool),
}
_CHECKED = _LENGTHS | KEYWORDS | _KINDS.keys() | {"type"}
_APPLICATORS = frozenset(("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties"))


def parsed_schema(text: str, what: str) -> Schema:
    """Parses a JSON schema.

    Raises:
        InvalidRequest: `text` is not a JSON object; `what` says whose it is.
    """
    try:
        schema = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not a JSON schema: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{what} must be a JSON schema, an object, not {text!r:.80}")
    return schema


def pointed(root: object, reference: str) -> Any:
    """Returns the target of a `$ref` within `root`: a JSON pointer (RFC 6901) after `#`. None if there is none."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    place = root
    for step in reference.split("/", _MAX_STEPS)[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        place = place.get(key) if isinstance(place, dict) else None
    return place


def edited(schema: Schema, *, of: str, strict: bool = False, lenient: bool = False, finite: bool = False) -> Schema:
    """Edits a schema. Everything that follows the result follows `schema` too.

    Args:
        schema: the user's schema, which is not changed.
        of: whose schema it is, for messages.
        strict: objects that don't say so may have only the listed properties.
        lenient: leave out what llguidance can't handle, rather than refuse it.
        finite: no numbers that a float can't hold.

    Raises:
        InvalidRequest: it is nested too deeply, or a keyword has an invalid value.
    """
    chosen = ((closed, strict), (_loosened, lenient), (_bounded, finite))
    edit = _combined(
        partial(checked, of=of),
        _without_comments,
        _narrowed,
        *(one for one, is_chosen in chosen if is_chosen),
        with_listed_names,
    )
    try:
        made: Schema = _edited(schema, edit)
    except RecursionError:
        raise InvalidRequest(f"{of}: it is nested too deeply") from None
    return made


def with_options(made: Schema, *, lenient: bool) -> Schema:
    """Adds llguidance's options to an edited schema, in a form that ends: white space is bounded."""
    options: Schema = {"whitespace_pattern": WHITE_SPACE}
    if not _CONTROL_ESCAPE.search(json.dumps(made)):
        options["json_allowed_escapes"] = _ESCAPES
    if lenient:
        options["lenient"] = True
    return {**made, "x-guidance": options}


def closed(schema: Schema) -> Schema:
    """Closes a plain object. One whose properties come from several places can't be closed in one of them."""
    is_plain = "properties" in schema and _APPLICATORS.isdisjoint(schema)
    return schema | {"additionalProperties": False} if is_plain and "additionalProperties" not in schema else schema


def inner(schema: Schema) -> Iterator[object]:
    """Yields the schemas directly within one, except definitions."""
    for key, value in schema.items():
        if key in _IN_LIST and isinstance(value, list):
            yield from value
        elif key in _IN_MAP and key not in _DEFINITIONS and isinstance(value, dict):
            yield from value.values()
        elif key in _IN_ONE:
            yield value


def on_its_own(part: Schema, root: Schema, of: str) -> Schema:
    """Returns a part of the schema `root` with everything that it refers to, and no other definitions.

    Raises:
        InvalidRequest: a reference leads nowhere; `of` says whose schema it is.
    """
    names: dict[str, str] = {}
    references: list[str] = []  # those with a name, in order

    def renamed(schema: Schema) -> Schema:
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return schema
        if reference not in names:
            names[reference] = str(len(names))
            references.append(reference)
        return schema | {"$ref": f"#/$defs/{names[reference]}"}

    made: Schema = _edited({key: value for key, value in part.items() if key not in _DEFINITIONS}, renamed)
    shared: Schema = {}
    for reference in references:  # grows meanwhile
        place = pointed(root, reference)
        if place is None:
            raise InvalidRequest(f"{of}: {reference!r:.80} is not in it")
        shared[names[reference]] = _edited(place, renamed)
    draft = {key: root[key] for key in ("$schema",) if key in root}
    return draft | made | ({"$defs": shared} if shared else {})


def checked(schema: Schema, of: str) -> Schema:
    """Returns `schema` if its own keywords have valid values; schemas within it are not checked.

    Raises:
        InvalidRequest: a keyword has an invalid value.
    """
    for keyword in _CHECKED & schema.keys():
        if not _is_possible(keyword, schema[keyword]):
            raise InvalidRequest(f"{of}: {keyword} can't be {reprlib.repr(schema[keyword])}")
    return schema


def _is_possible(keyword: str, value: object) -> bool:
    if keyword == "type":
        is_known = isinstance(value, str) or (isinstance(value, list) and all(map(_is_type, value)))
        return is_known and bool(value)
    if keyword in KEYWORDS:
        is_draft_4 = keyword.startswith("exclusive") and isinstance(value, bool)
        return is_draft_4 or (is_number(value) and (keyword != "multipleOf" or bool(value)))
    if keyword in _LENGTHS:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if keyword == "required" and isinstance(value, list):
        return all(isinstance(name, str) for name in value)
    return value is None or isinstance(value, _KINDS[keyword])  # some libraries write null for unset keywords


def _is_type(value: object) -> bool:
    return isinstance(value, str) and value in _TYPES


Edit = Callable[[Schema], Schema]


def _combined(*edits: Edit) -> Edit:
    def edit(schema: Schema) -> Schema:
        for one in edits:
            schema = one(schema)
        return schema

    return edit


def _edited(schema: Any, edit: Edit) -> Any:
    """Edits every schema in `schema`; values that only look like one, as in `enum`, are left alone."""
    if not isinstance(schema, dict):
        return schema
    made: Schema = {}
    for key, value in schema.items():
        if key in _IN_LIST and isinstance(value, list):
            made[key] = [_edited(each, edit) for each in value]
        elif key in _IN_MAP and isinstance(value, dict):
            made[key] = {name: _edited(each, edit) for name, each in value.items()}
        elif key in _IN_ONE:
            made[key] = _edited(value, edit)
        else:
            made[key] = value
    return edit(made)


def _without_comments(schema: Schema) -> Schema:
    kept = {key: value for key, value in schema.items() if key != "x-guidance"}  # only we set llguidance's options
    if kept.get("uniqueItems") is False:
        del kept["uniqueItems"]
    if isinstance(kept.get("format"), str) and kept["format"] not in FORMATS:
        del kept["format"]
    return kept


def _narrowed(schema: Schema) -> Schema:
    format_ = schema.get("format")
    patterns = _NARROWER.get(format_, ()) if isinstance(format_, str) else ()
    if not patterns or not isinstance(schema.get("allOf", []), list):
        return schema
    return schema | {"allOf": [*schema.get("allOf", []), *({"pattern": pattern} for pattern in patterns)]}


def _bounded(schema: Schema) -> Schema:
    """Makes numbers finite: llguidance allows an exponent if there are no bounds."""
    is_free = "number" in schema.get("type", ()) and not any(
        key.lower().endswith(("minimum", "maximum")) for key in schema
    )
    return schema | {"minimum": -_LARGEST, "maximum": _LARGEST} if is_free else schema


def _loosened(schema: Schema) -> Schema:
    """Removes what fails even if llguidance is told to be lenient."""
    reference, pattern = schema.get("$ref"), schema.get("pattern")
    patterns = schema.get("patternProperties")
    if isinstance(reference, str) and not reference.startswith("#"):
        schema = {key: value for key, value in schema.items() if key != "$ref"}
    if isinstance(pattern, str) and _LOOK_AROUND.search(pattern):
        schema = {key: value for key, value in schema.items() if key != "pattern"}
    if isinstance(patterns, dict) and (len(patterns) > 1 or any(map(_LOOK_AROUND.search, patterns))):
        left_out = ("patternProperties", "additionalProperties")
        schema = {key: value for key, value in schema.items() if key not in left_out}
    return schema


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number:.40} is more than a number can be")
    return value

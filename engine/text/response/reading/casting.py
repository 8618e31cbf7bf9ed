"""Converts values that a model writes as bare text to the types in their tool's schema."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from penstock.engine.text.response.grammar.schemas import pointed
from penstock.engine.text.response.reading.literals import whole_literal
from penstock.engine.text.response.reading.source import Malformed

_KINDS: Mapping[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}
_KIND_OF: Mapping[type, str] = {type_: kind for kind, types in reversed([*_KINDS.items()]) for type_ in types}
_CONTAINERS = ("array", "object")
_UNIONS = ("anyOf", "oneOf", "allOf")
MAX_DEPTH = 8  # of consecutive references
MAX_NODES = 256  # of one argument's schema, references included
MAX_LITERALS = 1024  # of one argument: if there are more, only their types count


class _Allowed(NamedTuple):
    """What a schema allows. No kinds means anything."""

    kinds: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    values: tuple[object, ...] = ()  # other than texts


_ANYTHING = _Allowed()


class ArgumentsSchema:
    """The JSON schema of one tool's arguments."""

    def __init__(self, text: str) -> None:
        """Parses a schema. A text that is not a schema restricts no argument."""
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            parsed = {}
        self._root: dict[str, Any] = parsed if isinstance(parsed, dict) else {}
        properties = self._resolved(self._root).get("properties")
        self._properties: dict[str, Any] = properties if isinstance(properties, dict) else {}
        required = self._resolved(self._root).get("required")
        self.required: Sequence[Any] = required if isinstance(required, list) else ()
        """Names of the arguments that there must be."""
        self._known: dict[str, _Allowed] = {}  # results by property

    @property
    def names(self) -> frozenset[str]:
        """Names of the arguments that the schema mentions."""
        return frozenset(self._properties)

    def cast(self, name: str, text: str) -> object:
        """Returns the value that `text` stands for as argument `name`: parsed as JSON if that is allowed, lists and
        mappings also as Python spells them; otherwise `text`.

        A string that reads like an allowed value of another type is that value. An argument that the schema does not
        mention may be anything.
        """
        allowed = self._allowed(name)
        if text in allowed.texts or allowed.kinds == {"string"}:
            return text
        value = _parsed(text)
        if value is text and not allowed.kinds.isdisjoint(_CONTAINERS):
            value = _spelled_by_python(text)
        if value is text or not allowed.kinds:
            return value
        return value if any(_is_a(value, kind) for kind in allowed.kinds) or value in allowed.values else text

    def _allowed(self, name: str) -> _Allowed:
        if name not in self._properties:
            return _ANYTHING
        if name not in self._known:
            self._known[name] = self._walked(self._properties[name])
        return self._known[name]

    def _walked(self, schema: Any) -> _Allowed:
        """Returns what a schema and the branches of its unions allow. With too many branches, anything is allowed."""
        kinds: set[str] = set()
        literals: list[object] = []
        left, seen = [schema], set[int]()
        while left:
            node = left.pop()
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            if len(seen) > MAX_NODES:
                return _ANYTHING
            if isinstance(node.get("$ref"), str):
                left.append(pointed(self._root, node["$ref"]))
                continue
            more_kinds, more_literals = _own(node)
            kinds |= more_kinds
            literals += more_literals
            left += _branches(node)
        if len(literals) > MAX_LITERALS:
            literals = []
        texts = frozenset(value for value in literals if isinstance(value, str))
        return _Allowed(frozenset(kinds), texts, tuple(value for value in literals if not isinstance(value, str)))

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """Follows references within the schema; one that leads nowhere allows anything."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict):
                return {}
            if not isinstance(schema.get("$ref"), str):
                return schema
            schema = pointed(self._root, schema["$ref"])
        return {}


def _own(schema: Mapping[str, Any]) -> tuple[set[str], list[object]]:
    """Returns the types and the single values that a schema itself names."""
    types = schema.get("type", [])
    kinds = {kind for kind in (types if isinstance(types, list) else [types]) if isinstance(kind, str)}
    literals = list(schema["enum"]) if isinstance(schema.get("enum"), list) else []
    if "const" in schema:
        literals.append(schema["const"])
    return kinds or {_KIND_OF.get(type_, "string") for type_ in set(map(type, literals))}, literals


def _branches(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the branches of a schema's unions, cut off at the limit."""
    found = [branch for union in _UNIONS if isinstance(schema.get(union), list) for branch in schema[union]]
    return found[: MAX_NODES + 1]


def _parsed(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        pass
    return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _spelled_by_python(text: str) -> object:
    """Returns the list or mapping that some templates, and so their models, spell as Python does; else `text`."""
    try:
        return whole_literal(text)
    except (Malformed, RecursionError):
        return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def _is_a(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS.get(kind, ())) or (
        kind == "integer" and isinstance(value, float) and value.is_integer()
    )

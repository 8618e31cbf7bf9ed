"""Checks whether a value can match two branches of a JSON schema's `oneOf`."""

from __future__ import annotations

from typing import Any

from penstock.engine.text.response.grammar.numbers import exact, is_number
from penstock.engine.text.response.grammar.schemas import Schema, pointed

_MAX_REFERENCES = 16  # in a row
_KINDS = frozenset(("array", "boolean", "integer", "null", "object", "string", "fraction"))


def kind_of(value: object) -> str:
    """Returns the type of a JSON value; for a number, `integer` if it is whole, otherwise `fraction`."""
    if is_number(value):
        return "integer" if exact(value).denominator == 1 else "fraction"
    names = {bool: "boolean", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def are_apart(one: object, other: object, root: Schema) -> bool:
    """Whether certainly no value matches both, by their types, their values, or a property that both require."""
    first, second = _resolved(one, root), _resolved(other, root)
    if _kinds(first).isdisjoint(_kinds(second)):
        return True
    values = _values(first), _values(second)
    if values[0] is not None and values[1] is not None:
        return not any(_are_equal(left, right) for left in values[0] for right in values[1])
    if _kinds(first) & _kinds(second) != {"object"}:
        return False
    shared = {*_required(first)} & {*_required(second)}
    return any(are_apart(_property(first, name), _property(second, name), root) for name in shared)


def _resolved(schema: object, root: Schema) -> Schema:
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        if not isinstance(schema.get("$ref"), str):
            return schema
        schema = pointed(root, schema["$ref"])
    return {}


def _values(schema: Schema) -> list[Any] | None:
    """Returns the values that the schema lists, or None if it does not list any."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _kinds(schema: Schema) -> frozenset[str]:
    said = schema.get("type")
    listed = _values(schema)
    kinds = _KINDS if said is None else frozenset([said] if isinstance(said, str) else said)
    if "number" in kinds:
        kinds |= {"integer", "fraction"}
    return kinds if listed is None else kinds & {kind_of(value) for value in listed}


def _required(schema: Schema) -> list[str]:
    said = schema.get("required")
    return said if isinstance(said, list) else []


def _property(schema: Schema, name: str) -> object:
    properties = schema.get("properties")
    return properties.get(name, {}) if isinstance(properties, dict) else {}


def _are_equal(one: Any, other: Any) -> bool:
    """Compares as JSON Schema does: 1 and 1.0 are equal. Arrays and objects with such parts may be, too."""
    if is_number(one) and is_number(other):
        return exact(one) == exact(other)
    return kind_of(one) == kind_of(other) and bool(one == other)

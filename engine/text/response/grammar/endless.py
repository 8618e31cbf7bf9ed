"""Removes the parts of a JSON schema that no finite value matches: a reply that began such a part would never end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.response.grammar.schemas import Schema, pointed

_IN_ONE = ("items", "additionalProperties", "additionalItems")
_IN_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_IN_MAP = ("properties", "patternProperties", "$defs", "definitions")
_OF_PARTS = frozenset(("array", "object"))


def without_endless(schema: Schema, *, of: str) -> Schema:
    """Returns a schema with the same finite values, whose endless parts are `false`.

    Raises:
        InvalidRequest: no finite value follows it; `of` says whose schema it is.
    """
    ends = _Ends(schema)
    made = ends.kept(schema)
    if not isinstance(made, dict):
        raise InvalidRequest(f"{of}: no finite value follows it, since a part of it requires itself")
    return made


class _Ends:
    """Says which schemas within a root have a finite value, as far as their recursion goes.

    A schema has one if it has one without the references that are still open: the least fixed point.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._finite: set[str] = set()  # references to what has a finite value
        references = {reference for each in _schemas(root) if isinstance(reference := each.get("$ref"), str)}
        while found := {each for each in references - self._finite if self.ends(pointed(root, each))}:
            self._finite |= found
        self._has_endless = self._finite != references

    def kept(self, schema: object) -> object:
        """Returns the schema with `false` for its endless parts, or for itself."""
        if not self._has_endless or not isinstance(schema, dict):
            return schema
        if not self.ends(schema):
            return False
        made: dict[str, Any] = dict(schema)
        for key, value in schema.items():
            if key in _IN_LIST and isinstance(value, list):
                made[key] = [self.kept(each) for each in value]
            elif key in _IN_MAP and isinstance(value, dict):
                made[key] = {name: self.kept(each) for name, each in value.items()}
            elif key in _IN_ONE:
                made[key] = self.kept(value)
        return made

    def ends(self, schema: object) -> bool:
        """Whether a finite value may follow a schema."""
        if not isinstance(schema, dict):
            return schema is not False
        if "const" in schema or "enum" in schema:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._finite and pointed(self._root, reference) is not None:
            return False
        if not all(self.ends(each) for each in _listed(schema, "allOf")):
            return False
        unions = [union for name in ("anyOf", "oneOf") if (union := _listed(schema, name))]
        return all(any(self.ends(each) for each in union) for union in unions) and self._has_kind(schema)

    def _has_kind(self, schema: Mapping[str, Any]) -> bool:
        said = schema.get("type")
        kinds = [said] if isinstance(said, str) else said
        if not kinds or not _OF_PARTS.issuperset(kinds):
            return True
        return ("object" in kinds and self._has_object(schema)) or ("array" in kinds and self._has_array(schema))

    def _has_object(self, schema: Mapping[str, Any]) -> bool:
        known = _named(schema, "properties")
        if not all(self.ends(known[name]) for name in _listed(schema, "required") if name in known):
            return False
        rest = schema.get("additionalProperties", True)
        is_open = self.ends(rest) or any(map(self.ends, _named(schema, "patternProperties").values()))
        return is_open or sum(map(self.ends, known.values())) >= schema.get("minProperties", 0)

    def _has_array(self, schema: Mapping[str, Any]) -> bool:
        least = schema.get("minItems", 0)
        first, rest = _listed(schema, "prefixItems"), schema.get("items", True)
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems", True)
        return all(map(self.ends, first[:least])) and (least <= len(first) or self.ends(rest))


def _schemas(schema: object) -> list[Schema]:
    """Returns a schema and all within it."""
    if not isinstance(schema, dict):
        return []
    within = [value for key in _IN_ONE if not isinstance(value := schema.get(key), list)]
    within += [each for key in _IN_LIST for each in _listed(schema, key)]
    within += [each for key in _IN_MAP for each in _named(schema, key).values()]
    return [schema, *(found for each in within for found in _schemas(each))]


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _named(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}

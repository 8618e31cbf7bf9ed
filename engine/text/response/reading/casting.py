"""Values that a model writes as bare text, made what the schema of their tool says."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

_KINDS: Mapping[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}
_UNIONS = ("anyOf", "oneOf", "allOf")
MAX_DEPTH = 8  # of references and unions


class Schema:
    """The JSON schema of one tool's arguments."""

    def __init__(self, text: str) -> None:
        """A text that is no schema says nothing of any argument."""
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            parsed = {}
        self._root: dict[str, Any] = parsed if isinstance(parsed, dict) else {}

    def cast(self, name: str, text: str) -> object:
        """What `text` stands for as the value of argument `name`: as JSON where that is allowed, else itself.

        A string that reads like an allowed value of another type is that value. An argument that the schema says
        nothing of may be anything.
        """
        kinds, literals = self._allowed(self._property(name), MAX_DEPTH)
        if text in literals:
            return text
        if kinds == {"string"}:
            return text
        value = _parsed(text)
        if value is text or not kinds:
            return value
        return value if any(_is_a(value, kind) for kind in kinds) or value in literals else text

    def _property(self, name: str) -> Any:
        properties = self._resolved(self._root).get("properties")
        return properties.get(name) if isinstance(properties, dict) else None

    def _allowed(self, schema: Any, depth: int) -> tuple[set[str], list[object]]:
        """The types and the single values that a schema allows; none: anything."""
        schema = self._resolved(schema)
        types = schema.get("type", [])
        kinds = {kind for kind in (types if isinstance(types, list) else [types]) if isinstance(kind, str)}
        literals = list(schema["enum"]) if isinstance(schema.get("enum"), list) else []
        if "const" in schema:
            literals.append(schema["const"])
        if not kinds and literals:
            kinds = {_kind_of(literal) for literal in literals}
        for branch in self._branches(schema) if depth else ():
            more_kinds, more_literals = self._allowed(branch, depth - 1)
            kinds |= more_kinds
            literals += more_literals
        return kinds, literals

    @staticmethod
    def _branches(schema: Mapping[str, Any]) -> list[Any]:
        return [branch for union in _UNIONS if isinstance(schema.get(union), list) for branch in schema[union]]

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """Follows references within the schema; one that leads nowhere allows anything."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict):
                return {}
            if not isinstance(schema.get("$ref"), str):
                return schema
            schema = self._at(schema["$ref"])
        return {}

    def _at(self, reference: str) -> Any:
        place: Any = self._root
        if not reference.startswith("#"):
            return None
        for step in reference[1:].strip("/").split("/") if reference != "#" else ():
            key = step.replace("~1", "/").replace("~0", "~")
            place = place.get(key) if isinstance(place, dict) else None
        return place


def _parsed(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        pass
    return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def _kind_of(value: object) -> str:
    return next((kind for kind in _KINDS if _is_a(value, kind)), "string")


def _is_a(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS.get(kind, ())) or (
        kind == "integer" and isinstance(value, float) and value.is_integer()
    )

"""Finds the parts of a JSON schema that have numbers that llguidance rounds or refuses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from penstock.engine.text.response.grammar.numbers import BOUNDS, is_kept, is_kept_multiple, is_number
from penstock.engine.text.response.grammar.schemas import Schema, inner, pointed


class LongNumbers:
    """The parts of one schema that have such numbers, or refer to parts that do."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._references = self._long_references()
        self._known: dict[int, tuple[Schema, bool]] = {}  # schemas are kept, so that their ids stay unique

    def __contains__(self, schema: object) -> bool:
        if not isinstance(schema, dict):
            return False
        known = self._known.get(id(schema))
        if known is None:
            known = schema, self._has_one(schema)
            self._known[id(schema)] = known
        return known[1]

    def first(self, schema: object) -> float | None:
        """Returns one such number in a schema, for messages."""
        seen: set[str] = set()
        left = [schema]
        while left:
            for part in _parts(left.pop()):
                for number in _own(part):
                    return number
                reference = part.get("$ref")
                if isinstance(reference, str) and reference in self._references - seen:
                    seen.add(reference)
                    left.append(pointed(self._root, reference))
        return None

    def _has_one(self, schema: Schema) -> bool:
        return (
            next(_own(schema), None) is not None
            or schema.get("$ref") in self._references
            or any(part in self for part in inner(schema))
        )

    def _long_references(self) -> set[object]:
        """Returns the references that lead to such numbers, also through other references."""
        found: set[object] = set()
        users: dict[str, list[str]] = defaultdict(list)  # referring references by target
        seen: set[str] = set()
        left = [*_references(self._root)]
        while left:
            reference = left.pop()
            if reference in seen:
                continue
            seen.add(reference)
            place = pointed(self._root, reference)
            if any(next(_own(part), None) is not None for part in _parts(place)):
                found.add(reference)
            for used in _references(place):
                users[used].append(reference)
                left.append(used)
        left = [reference for reference in seen if reference in found]
        while left:
            more = [user for user in users[left.pop()] if user not in found]
            found.update(more)
            left += more
        return found


def has_long_number(value: object) -> bool:
    """Whether a value in a schema, not a schema itself, has such a number."""
    return next(_long_numbers(value), None) is not None


def _parts(schema: object) -> Iterator[Schema]:
    """Yields a schema and those in it, except definitions."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
            left += inner(part)


def _references(schema: object) -> Iterator[str]:
    return (part["$ref"] for part in _parts(schema) if isinstance(part.get("$ref"), str))


def _own(schema: Schema) -> Iterator[float]:
    """Yields the long numbers in the schema's own keywords."""
    for keyword in BOUNDS & schema.keys():
        if is_number(schema[keyword]) and not is_kept(schema[keyword]):
            yield schema[keyword]
    if is_number(schema.get("multipleOf")) and not is_kept_multiple(schema["multipleOf"]):
        yield schema["multipleOf"]
    if "const" in schema:
        yield from _long_numbers(schema["const"])
    if isinstance(schema.get("enum"), list):
        yield from _long_numbers(schema["enum"])


def _long_numbers(value: object) -> Iterator[float]:
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list):
            left += part
        elif is_number(part) and not is_kept(part):
            yield part

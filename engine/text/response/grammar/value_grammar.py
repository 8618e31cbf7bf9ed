"""The grammar of arguments that are not one JSON object: each value by itself, strings in the format's own way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.response.grammar.json_grammar import JsonGrammar
from penstock.engine.text.response.grammar.lark import GrammarWriter, either, literal
from penstock.engine.text.response.grammar.schemas import Schema, checked, edited, pointed

_NUMBERS = {
    "integer": "/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/",  # never infinite
}
_MAX_REFERENCES = 16  # in a row
_MAX_NODES = 256  # of one argument's unions, references included
_MAX_CHARS = 2**19  # of all rules, repeated ones included; compilers refuse longer grammars
_NOTES = frozenset(("title", "description", "default", "examples", "deprecated", "$comment", "format", "nullable"))


class ValueGrammar:
    def __init__(
        self,
        writer: GrammarWriter,
        root: Schema,
        words: Mapping[str, str],
        text: Callable[[Schema, bool], str],
        lexeme: Callable[[str], str],
        other: Callable[[str], str],
        *,
        reads_json: bool,
        strict: bool,
        of: str,
    ) -> None:
        """Prepares the grammar of one tool's arguments.

        Args:
            writer: the writer of the whole grammar.
            root: the schema of the arguments.
            words: the format's spelling of true, false and null, if it is not JSON's.
            text: writes a string that follows a schema; with True, it must not read like a value of another type.
            lexeme: makes a value from a lexeme of any other type.
            other: makes a value from a rule of any other type.
            reads_json: whether a string may also be written as JSON.
            strict: refuse what can't be enforced.
            of: whose schema it is, for messages.
        """
        self._writer = writer
        self._root = root
        self._words = words
        self._text = text
        self._lexeme = lexeme
        self._other = other
        self._reads_json = reads_json
        self._strict = strict
        self._of = of
        self._places: dict[str, object] = {}  # targets by reference

    def value(self, schema: object) -> str:
        """Returns the values that follow `schema`.

        Raises:
            InvalidRequest: the schema has too many parts or is malformed, or the grammar gets too long.
        """
        alternatives = self._alternatives(schema)
        is_mixed = not all(map(_is_text, alternatives))
        return either([self._bounded(self._alternative(each, is_mixed)) for each in alternatives])

    def _bounded(self, written: str) -> str:
        if self._writer.num_chars > _MAX_CHARS:
            raise InvalidRequest(f"{self._of}: it makes the grammar longer than {_MAX_CHARS} characters")
        return written

    def _alternative(self, schema: Schema, is_mixed: bool) -> str:
        if _is_text(schema) or self._is_unclear(schema):
            return self._text({"type": "string"} | schema, is_mixed)
        scalar = self._scalar(schema)
        if scalar is not None:
            return self._lexeme(scalar)
        return self._other(self._json.value(self._edited(schema)))

    @cached_property
    def _json(self) -> JsonGrammar:
        return JsonGrammar(self._writer, self._edited(self._root), of=self._of, lenient=not self._strict)

    def _edited(self, schema: Schema) -> Schema:
        return edited(schema, of=self._of, strict=self._strict, lenient=not self._strict, finite=True)

    def resolved(self, schema: object) -> Schema:
        """Returns the schema that references lead to."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict):
                return {}
            if not isinstance(schema.get("$ref"), str):
                return checked(schema, self._of)
            schema = self._resolve(schema["$ref"])
        raise InvalidRequest(f"{self._of}: its references go in circles")

    def _resolve(self, reference: str) -> object:
        if reference not in self._places:
            place = pointed(self._root, reference)
            if place is None:
                raise InvalidRequest(f"{self._of}: {reference!r:.80} is not in it")
            self._places[reference] = place
        return self._places[reference]

    def _alternatives(self, schema: object) -> list[Schema]:
        """Returns what a value may be, one kind at a time. A union's branches that lead back to it add nothing."""
        found: list[Schema] = []
        left, seen = [schema], set[int]()
        while left:
            node = self.resolved(left.pop())
            if id(node) in seen:
                continue
            seen.add(id(node))
            if len(seen) + len(left) > _MAX_NODES:
                raise InvalidRequest(f"{self._of}: an argument has more than {_MAX_NODES} alternatives")
            if _is_union(node):
                left += reversed(node["anyOf"])
            else:
                found += _kinds(node)
        if not found:
            raise InvalidRequest(f"{self._of}: its references go in circles")
        return found

    def _is_unclear(self, schema: Schema) -> bool:
        """Whether it may be a string without saying so: then a reader can't tell."""
        if self._reads_json or "const" in schema or isinstance(schema.get("type"), str):
            return False
        if self._strict and not _NOTES.issuperset(schema):
            raise InvalidRequest(f"{self._of}: an argument needs a type in this model's format: {schema!r:.120}")
        return True

    def _scalar(self, schema: Schema) -> str | None:
        """Returns a lexeme for a scalar that is not a string, or None if one lexeme is not enough."""
        kind = schema.get("type")
        if "const" in schema:
            return None if isinstance(schema["const"], dict | list) else self._spelled(json.dumps(schema["const"]))
        if kind == "null":
            return self._spelled("null")
        if kind == "boolean":
            return either(map(self._spelled, ("true", "false")))
        is_free = _NOTES.issuperset(schema.keys() - {"type"})
        return _NUMBERS[kind] if kind in _NUMBERS and is_free else None

    def _spelled(self, word: str) -> str:
        return literal(self._words.get(word, word))


def _is_union(schema: Schema) -> bool:
    """Whether the schema is nothing but a union."""
    return bool(schema.get("anyOf")) and _NOTES.issuperset(schema.keys() - {"anyOf"})


def _kinds(schema: Schema) -> list[Schema]:
    if isinstance(schema.get("type"), list):
        return [schema | {"type": type_} for type_ in dict.fromkeys(schema["type"])]
    if schema.get("enum"):
        return [{"const": value} for value in schema["enum"]]
    return [schema]


def _is_text(schema: Schema) -> bool:
    return isinstance(schema["const"], str) if "const" in schema else schema.get("type") == "string"

"""The grammar of JSON that follows a schema: llguidance's own, except for parts with numbers that it would round.

These parts are written out here, from the root down to the number. Keywords next to one that can't be written out are
refused by name, or ignored if the schema need not be followed strictly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from penstock.engine.errors import InvalidRequest, shown
from penstock.engine.text.response.grammar.branches import are_apart, kind_of
from penstock.engine.text.response.grammar.endless import without_endless
from penstock.engine.text.response.grammar.lark import GrammarWriter, either, literal, separated, sequence
from penstock.engine.text.response.grammar.long_numbers import LongNumbers, has_long_number
from penstock.engine.text.response.grammar.numbers import KEYWORDS, Numbers, exact, is_number, spelled
from penstock.engine.text.response.grammar.schemas import WHITE_SPACE, Schema, on_its_own, pointed, with_options

_KEY = r'/"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/'
_LITERALS = frozenset(("const", "enum"))
_BY_KIND: Mapping[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "number": KEYWORDS,
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "array": frozenset(
        ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains",
         "maxContains", "unevaluatedItems")
    ),
    "object": frozenset(
        ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
         "maxProperties", "unevaluatedProperties", "dependencies", "dependentRequired", "dependentSchemas")
    ),
}  # fmt: skip
_OF_ARRAYS = frozenset(("items", "prefixItems", "additionalItems", "minItems", "maxItems"))
_OF_OBJECTS = frozenset(("properties", "required", "additionalProperties"))
_OF_ALL = frozenset(
    ("type", "$ref", "const", "enum", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "$dynamicRef")
)
_KEYWORDS = _OF_ALL.union(*_BY_KIND.values())  # any other has no effect
_MAX_CHARS = 2**19  # of all rules, repeated ones included; compilers refuse longer grammars


class JsonGrammar:
    """Writes the values that follow one schema, or a part of it."""

    def __init__(self, writer: GrammarWriter, root: Schema, *, of: str, lenient: bool) -> None:
        """Prepares the grammar of a schema.

        Args:
            writer: the writer of the whole grammar.
            root: an edited schema, which contains the targets of all references.
            of: whose schema it is, for messages.
            lenient: ignore what can't be enforced, rather than refuse it.

        Raises:
            InvalidRequest: the schema must be followed, and no finite value does.
        """
        self._writer = writer
        root = root if lenient else without_endless(root, of=of)
        self._root = root
        self._of = of
        self._lenient = lenient
        self._long = LongNumbers(root)
        self._space = f"({writer.terminal(f'/{WHITE_SPACE}/')})?" if root in self._long else ""
        self._rules: dict[str, str] = {}  # rule names by reference

    def all(self) -> str:
        """Returns the values of the root. Raises what `value` does."""
        return self.value(self._root)

    def value(self, schema: object) -> str:
        """Returns the values of an edited schema: the root, or one whose references are within the root.

        Raises:
            InvalidRequest: a keyword next to a long number can't be written out, a reference leads nowhere, no value
                follows the schema, or the grammar gets too long.
        """
        if isinstance(schema, dict) and schema in self._long:
            return self._bounded(self._written(schema))
        whole = schema if isinstance(schema, dict) else {}
        if whole is not self._root:
            whole = on_its_own(whole, self._root, self._of)
        return self._bounded(self._writer.json(with_options(whole, lenient=self._lenient)))

    def _bounded(self, written: str) -> str:
        if self._writer.num_chars > _MAX_CHARS:
            raise InvalidRequest(f"{self._of}: it makes the grammar longer than {_MAX_CHARS} characters")
        return written

    def _written(self, schema: Schema) -> str:
        if isinstance(schema.get("$ref"), str):
            self._allow(schema, ("$ref",))
            return self._referred(schema["$ref"])
        for union in ("anyOf", "oneOf"):
            if isinstance(schema.get(union), list):
                self._allow(schema, (union,))
                return self._union(schema[union], is_exclusive=union == "oneOf")
        if isinstance(schema.get("allOf"), list):
            schema = self._merged(schema)
            return self.value(schema)
        if not _LITERALS.isdisjoint(schema):
            return self._literals(schema)
        return either(self._kind_rule(kind, schema) for kind in _kinds(schema))

    def _allow(self, schema: Schema, keywords: Iterable[str], among: frozenset[str] = _KEYWORDS) -> None:
        """Refuses a schema that has other keywords of `among` than `keywords`."""
        beyond = sorted(among & schema.keys() - {*keywords})
        if beyond and not self._lenient:
            number = self._long.first(schema)
            raise InvalidRequest(f"{self._of}: {shown(number)} can't be kept as it is written beside {beyond[0]!r}")

    def _referred(self, reference: str) -> str:
        if reference not in self._rules:
            place = pointed(self._root, reference)
            self._rules[reference], define = self._writer.forward()
            define(self.value(place))
        return self._rules[reference]

    def _union(self, branches: Sequence[object], *, is_exclusive: bool) -> str:
        if is_exclusive and not self._lenient:
            for one, other in combinations(branches, 2):
                if not are_apart(one, other, self._root):
                    number = shown(self._long.first({"anyOf": branches}))
                    raise InvalidRequest(
                        f"{self._of}: {number} can't be kept as it is written in oneOf, whose branches may overlap"
                    )
        return either(self.value(branch) for branch in branches if branch is not False)

    def _merged(self, schema: Schema) -> Schema:
        """Merges a schema with the branches of its `allOf` if no two use the same keyword."""
        merged = {key: value for key, value in schema.items() if key != "allOf"}
        for branch in schema["allOf"]:
            said = branch if isinstance(branch, dict) else {}
            if _KEYWORDS & said.keys() & merged.keys():
                self._allow(schema, ())
            else:
                merged |= said
        return merged

    def _literals(self, schema: Schema) -> str:
        """Writes `const` and `enum`: values with a long number as literals, all others as they are."""
        said: list[Any] = [schema["const"]] if "const" in schema else schema["enum"]
        others = {key: value for key, value in schema.items() if key not in _LITERALS}
        long = [value for value in said if has_long_number(value)]
        short = [value for value in said if not has_long_number(value)]
        has_parts = any(isinstance(value, dict | list) for value in long)
        literals = _LITERALS if "const" not in schema or "enum" not in schema else ("const",)
        self._allow(schema, ("type", *literals), _KEYWORDS if has_parts else _OF_ALL)
        kinds = _kinds(others)
        found = [self._constant(value, kinds) for value in long if self._is_of(value, kinds, others)]
        if short:
            found.append(self.value(others | {"enum": short}))
        if not found:
            raise self._nothing()
        return either(found)

    def _is_of(self, value: Any, kinds: Sequence[str], schema: Schema) -> bool:
        if not is_number(value):
            return kind_of(value) in kinds
        number = exact(value)
        return any(
            number in Numbers.of(schema, is_whole=kind == "integer") for kind in kinds if kind in ("integer", "number")
        )

    def _constant(self, value: Any, kinds: Sequence[str] = ("number",)) -> str:
        """Writes a single value. An object has its keys in this order."""
        if not has_long_number(value):
            return self.value({"const": value})
        if isinstance(value, list):
            return self._enclosed_list("[", [self._constant(item) for item in value], "]")
        if isinstance(value, dict):
            return self._enclosed_list(
                "{", [self._pair(_spelled_key(key), self._constant(value[key])) for key in value], "}"
            )
        return literal(spelled(value, is_whole="number" not in kinds))

    def _kind_rule(self, kind: str, schema: Schema) -> str:
        said = _BY_KIND["number" if kind == "integer" else kind]
        part = {"type": kind} | {key: value for key, value in schema.items() if key in said}
        self._allow(schema, ("type",), _OF_ALL)
        if part not in self._long:
            return self.value(part)
        if kind in ("integer", "number"):
            return self._numbers(part, is_whole=kind == "integer")
        return self._array(part) if kind == "array" else self._object(part)

    def _numbers(self, schema: Schema, *, is_whole: bool) -> str:
        numbers = Numbers.of(schema, is_whole=is_whole)
        lexeme = numbers.lexeme()
        if lexeme is None and not self._lenient:
            self._allow(schema, ("type",))
        return self._writer.terminal(lexeme or Numbers.of({}, is_whole=is_whole).lexeme() or "")

    def _object(self, schema: Schema) -> str:
        self._allow(schema, ("type", *_OF_OBJECTS))
        rest = schema.get("additionalProperties", True)
        known = schema.get("properties") or {}
        required = [name for name in schema.get("required") or () if isinstance(name, str)]
        schemas = known | {name: rest for name in required if name not in known}
        if any(schemas[name] is False for name in required):
            raise self._nothing()
        members = [
            (self._pair(_spelled_key(name), self.value(each)), name in required)
            for name, each in schemas.items()
            if each is not False
        ]
        more = ""
        if rest is not False:
            others = f"{_KEY} & ~({' | '.join(map(_spelled_key, schemas))})" if schemas else _KEY
            more = self._pair(self._writer.terminal(others), self.value(rest))
        return self._enclosed("{", separated(self._writer, members, self._comma, more), "}")

    def _array(self, schema: Schema) -> str:
        self._allow(schema, ("type", *_OF_ARRAYS))
        first, rest = schema.get("prefixItems"), schema.get("items", True)
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems", True)
        at_least, at_most = schema.get("minItems", 0), schema.get("maxItems")
        first = [*(first or ())][:at_most]
        first = first[: next((place for place, item in enumerate(first) if item is False), None)]
        most = None if at_most is None else at_most - len(first)
        least = max(0, at_least - len(first))
        if (most is not None and most < least) or (least and rest is False):
            raise self._nothing()
        items = [self.value(item) for item in first]
        written = (
            "" if rest is False or most == 0 else self._repeated(self.value(rest), least, most, is_first=not items)
        )
        for place in reversed(range(len(items))):
            written = sequence([self._comma if place else "", items[place], written])
            written = self._writer.rule(written if place < at_least else f"({written})?")
        return self._enclosed("[", written, "]")

    def _repeated(self, item: str, least: int, most: int | None, *, is_first: bool) -> str:
        """Writes items with a comma before each, except the first of an array."""
        again = f"({sequence([self._comma, item])})"
        if not is_first:
            return f"{again}{{{least},{'' if most is None else most}}}"
        others = "" if most == 1 else f"{again}{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        written = sequence([item, others])
        return written if least else f"({written})?"

    @property
    def _comma(self) -> str:
        return sequence([self._space, literal(","), self._space])

    def _pair(self, key: str, value: str) -> str:
        return sequence([key, self._space, literal(":"), self._space, value])

    def _enclosed_list(self, opener: str, members: Sequence[str], closer: str) -> str:
        return self._enclosed(opener, f" {self._comma} ".join(members), closer)

    def _enclosed(self, opener: str, inner: str, closer: str) -> str:
        return sequence([literal(opener), self._space, inner, self._space if inner else "", literal(closer)])

    def _nothing(self) -> InvalidRequest:
        return InvalidRequest(f"{self._of}: nothing follows a part of it that has a long number")


def _spelled_key(name: str) -> str:
    return literal(json.dumps(name, ensure_ascii=False))


def _kinds(schema: Schema) -> list[str]:
    """Returns the types that a schema allows; `number` includes whole numbers."""
    said = schema.get("type")
    kinds = [*_BY_KIND] if said is None else [said] if isinstance(said, str) else [*dict.fromkeys(said)]
    return [kind for kind in kinds if kind != "integer" or "number" not in kinds]

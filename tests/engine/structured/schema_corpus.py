"""JSON schemas of the kinds that are published, from a seeded generator: the same schemas at every run.

The mix follows public collections: function arguments, configuration files, events, resources of HTTP APIs, manifests
with shared definitions, trees, unions, maps, tables. A tail has rare keywords that constrained decoding can't follow.
Every schema is valid by its own draft, and something satisfies it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

DRAFTS = (
    None,
    "http://json-schema.org/draft-07/schema#",
    "https://json-schema.org/draft/2020-12/schema",
    "http://json-schema.org/draft-04/schema#",
)
_NOUNS = """
    id name title email address city country user account order item price amount currency status type kind label
    tags notes owner author version release path host port region zone bucket key value limit offset page query
    filter start end date time duration width height color image caption url link score rating weight unit
    language locale message subject body priority enabled visible parent children level count total
"""
NOUNS = tuple(_NOUNS.split())
ADJECTIVES = ("first", "last", "max", "min", "default", "current", "is", "has", "primary", "raw", "target", "source")
_WORDS = """
    active inactive pending done failed open closed draft public private internal small medium large red green blue
    low normal high critical daily weekly monthly none all read write admin guest json yaml csv café naïve 日本
"""
WORDS = tuple(_WORDS.split())
FORMATS = ("date-time", "date", "time", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "duration")
LOOSE_FORMATS = ("int32", "double", "password", "topic", "color", "byte")  # annotations, in no draft
PATTERNS = (
    "^[A-Z]{2,3}$",
    "^[a-z][a-z0-9_-]*$",
    "^#[0-9a-fA-F]{6}$",
    r"^\d{5}(-\d{4})?$",
    r"^v?[0-9]+\.[0-9]+\.[0-9]+$",
    "^(GET|POST|PUT|DELETE)$",
    r"^\+?[0-9 ]{6,15}$",
    "[a-z]+",
    r"^[^@\s]+@[^@\s]+$",
    r"^(\w+/)*\w+\.(png|jpe?g)$",
    "^.{1,20}$",
)


def schemas(count: int, seed: int = 0) -> list[Schema]:
    """Returns the first `count` schemas of this seed; a longer list begins with the shorter one."""
    return [_Maker(random.Random(f"{seed}/{number}")).schema() for number in range(count)]


class _Maker:
    """Makes one schema. Its definitions are collected on the way."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.draft = rng.choices(DRAFTS, weights=(30, 35, 20, 15))[0]
        self.definitions: Schema = {}
        self.defs_key = "$defs" if self.draft is None or "2020" in self.draft else "definitions"

    def schema(self) -> Schema:
        kinds: tuple[tuple[Callable[[], Schema], int], ...] = (
            (self.function_arguments, 20),
            (self.configuration, 18),
            (self.event, 12),
            (self.resource, 16),
            (self.manifest, 8),
            (self.tree, 6),
            (self.union, 8),
            (self.map, 5),
            (self.table, 4),
            (self.odd, 9),
        )
        makers, weights = zip(*kinds, strict=True)
        body = self.rng.choices(makers, weights=weights)[0]()
        head: Schema = {} if self.draft is None else {"$schema": self.draft}
        if self.chance(0.4):
            head["title"] = self.phrase()
        if self.definitions:
            body[self.defs_key] = self.definitions
        return {**head, **body}

    # Kinds of schemas.

    def function_arguments(self) -> Schema:
        schema = self.object(1, self.rng.randint(1, 6), self.argument)
        if self.chance(0.5):
            schema["additionalProperties"] = False
        return schema

    def configuration(self) -> Schema:
        schema = self.object(3, self.rng.randint(3, 9), self.setting)
        schema["required"] = schema["required"][:2]
        if self.chance(0.3):
            schema["patternProperties"] = {"^x-": {}}
        if self.chance(0.6):
            schema["additionalProperties"] = self.chance(0.2)
        return schema

    def event(self) -> Schema:
        schema = self.object(1, self.rng.randint(3, 10), self.field_of_event)
        schema["additionalProperties"] = False
        schema["description"] = f"Schema for {self.phrase()}"
        if self.chance(0.5):
            schema["self"] = {"vendor": "com.example", "name": "event", "format": "jsonschema", "version": "1-0-0"}
        return schema

    def resource(self) -> Schema:
        return self.object(self.rng.randint(2, 4), self.rng.randint(3, 8), self.any_value)

    def manifest(self) -> Schema:
        for name in ("ObjectMeta", "Selector", "Quantity", "Port"):
            self.definitions[name] = self.object(1, self.rng.randint(2, 5), self.scalar)
        self.definitions["Quantity"] = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
        schema = self.object(2, self.rng.randint(2, 4), self.any_value)
        schema["properties"] |= {
            "apiVersion": {"type": ["string", "null"], "enum": ["v1", "v1beta1", None]},
            "kind": {"const": "Service"} if self.defs_key == "$defs" else {"enum": ["Service"]},
            "metadata": {"description": "Standard metadata", **self.ref("ObjectMeta")},
            "ports": {"type": "array", "items": self.ref("Port")},
            "capacity": {"type": "object", "additionalProperties": self.ref("Quantity")},
        }
        schema["required"] = ["apiVersion", "kind"]
        return schema

    def tree(self) -> Schema:
        node = self.object(0, self.rng.randint(1, 3), self.scalar)
        node["properties"]["children"] = {"type": "array", "items": self.ref("node")}
        if self.chance(0.5):
            node["properties"]["next"] = {"anyOf": [self.ref("node"), {"type": "null"}]}
        if self.chance(0.3):
            node["properties"]["expr"] = self.ref("expr")
            self.definitions["expr"] = {
                "anyOf": [
                    {"type": "number"},
                    {
                        "type": "object",
                        "properties": {
                            "op": {"enum": ["+", "-", "*"]},
                            "args": {"type": "array", "items": self.ref("expr"), "minItems": 1, "maxItems": 3},
                        },
                        "required": ["op", "args"],
                        "additionalProperties": False,
                    },
                ]
            }
        node["additionalProperties"] = False
        self.definitions["node"] = node
        return {"type": "object", "properties": {"root": self.ref("node")}, "required": ["root"]}

    def union(self) -> Schema:
        tag = self.noun()
        names = self.rng.sample(WORDS, self.rng.randint(2, 4))
        members = [self.tagged(tag, name) for name in names]
        keyword = self.rng.choice(("anyOf", "anyOf", "oneOf"))
        if self.chance(0.5):
            return {keyword: members}
        return {"type": "object", "properties": {"entries": {"type": "array", "items": {keyword: members}}}}

    def map(self) -> Schema:
        values = self.any_value(1)
        schema: Schema = {"type": "object"}
        if self.chance(0.5):
            schema["additionalProperties"] = values
        else:
            schema["patternProperties"] = {self.rng.choice(("^[a-z]+$", "^[A-Z_]{1,12}$", "^\\d+$")): values}
            schema["additionalProperties"] = False
        if self.chance(0.3):
            schema["minProperties"] = 1
        if self.chance(0.2):
            schema["maxProperties"] = 5
        return schema

    def table(self) -> Schema:
        cells = [self.scalar(0) for _ in range(self.rng.randint(2, 4))]
        row: Schema = {"type": "array", "minItems": len(cells), "maxItems": len(cells)}
        row |= {"prefixItems": cells} if self.draft is None or "2020" in self.draft else {"items": cells}
        columns = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 10}
        properties = {"columns": columns, "rows": {"type": "array", "items": row}}
        return {"type": "object", "properties": properties, "required": ["columns", "rows"]}

    def odd(self) -> Schema:
        schema = self.object(1, self.rng.randint(1, 4), self.any_value)
        name = next(iter(schema["properties"]))
        odd: tuple[Schema, ...] = (
            {"not": {"required": ["forbidden"]}},
            {"if": {"required": [name]}, "then": {"minProperties": 1}},
            {"dependencies": {name: [name]}},
            {"propertyNames": {"pattern": "^[a-zA-Z_]+$"}},
            {"anyOf": [{"required": [name]}, {"required": ["fallback"]}]},
            {"allOf": [{"properties": {"added": {"type": "integer"}}, "required": ["added"]}]},
            {"minProperties": 2},
        )
        items: tuple[Schema, ...] = (
            {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
            {"type": "array", "contains": {"type": "integer"}},
            {"type": "string", "pattern": "^(?!test).*$"},
            {"type": "string", "format": "uri-reference"},
            {"oneOf": [{"type": "number"}, {"type": "integer", "minimum": 5}]},
            {"oneOf": [{"type": "string", "maxLength": 5}, {"type": "array", "items": {"type": "string"}}]},
            {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 8}]},
            {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
            {"type": "number", "multipleOf": 0.5},
        )
        if self.chance(0.5):
            return schema | self.rng.choice(odd)
        schema["properties"]["odd"] = self.rng.choice(items)
        schema["required"].append("odd")
        return schema

    # What they consist of.

    def object(self, depth: int, num_fields: int, field: Callable[[int], Schema]) -> Schema:
        names = list(dict.fromkeys(self.name() for _ in range(num_fields)))
        properties = {name: field(depth) for name in names}
        required = [name for name in names if self.chance(0.6)] or names[:1]  # draft 4 wants one
        return {"type": "object", "properties": properties, "required": required}

    def argument(self, depth: int) -> Schema:
        return {**self.any_value(depth), "description": f"The {self.phrase()}."}

    def setting(self, depth: int) -> Schema:
        value = self.object(depth - 1, self.rng.randint(1, 4), self.setting) if depth and self.chance(0.3) else None
        value = value or self.any_value(min(depth, 1))
        if value.get("type") == "boolean":
            value["default"] = False
        if value.get("type") == "string" and self.chance(0.4):
            value |= {"description": self.phrase(), "examples": ["a", "b"]}
        return value

    def field_of_event(self, depth: int) -> Schema:
        if self.chance(0.4):
            return {"type": ["string", "null"], "maxLength": self.rng.choice((16, 64, 255, 4096)), "description": "id"}
        if self.chance(0.3):
            return {"type": ["integer", "null"], "minimum": 0, "maximum": self.rng.choice((100, 32767, 2147483647))}
        return self.any_value(depth)

    def any_value(self, depth: int) -> Schema:
        if depth <= 0 or self.chance(0.55):
            return self.scalar(depth)
        kind = self.rng.choice(("object", "array", "array", "map", "any of", "ref", "nullable"))
        if kind == "object":
            return self.object(depth - 1, self.rng.randint(1, 4), self.any_value)
        if kind == "array":
            return self.array(depth - 1)
        if kind == "map":
            return {"type": "object", "additionalProperties": self.any_value(depth - 1)}
        if kind == "any of":
            return {"anyOf": [self.any_value(depth - 1), self.scalar(0)]}
        if kind == "ref":
            return self.shared(depth - 1)
        return {"anyOf": [self.any_value(depth - 1), {"type": "null"}], "default": None}

    def array(self, depth: int) -> Schema:
        schema: Schema = {"type": "array", "items": self.any_value(depth)}
        if self.chance(0.3):
            schema["minItems"] = self.rng.randint(0, 2)
        if self.chance(0.2):
            schema["maxItems"] = self.rng.randint(2, 20)
        if self.chance(0.06):
            schema["uniqueItems"] = True
        return schema

    def shared(self, depth: int) -> Schema:
        if not self.definitions or self.chance(0.6):
            self.definitions[f"{self.noun()}{len(self.definitions)}"] = self.object(
                depth - 1, self.rng.randint(1, 4), self.any_value
            )
        return self.ref(self.rng.choice(list(self.definitions)))

    def scalar(self, _depth: int) -> Schema:
        makers = (self.string, self.string, self.enumeration, self.integer, self.number, self.boolean)
        return self.rng.choice(makers)()

    def string(self) -> Schema:
        schema: Schema = {"type": "string"}
        kind = self.rng.random()
        if kind < 0.2:
            schema["format"] = self.rng.choice(FORMATS)
        elif kind < 0.3:
            schema["pattern"] = self.rng.choice(PATTERNS)
        elif kind < 0.45:
            schema |= {"minLength": self.rng.randint(0, 3), "maxLength": self.rng.choice((3, 10, 50, 200))}
        elif kind < 0.48:
            schema["format"] = self.rng.choice(LOOSE_FORMATS)
        return schema

    def enumeration(self) -> Schema:
        values: list[Any] = self.rng.sample(WORDS, self.rng.randint(2, 6))
        if self.chance(0.1):
            return {"enum": [*values, None, 1, True]}
        return {"type": "string", "enum": values}

    def integer(self) -> Schema:
        schema: Schema = {"type": "integer"}
        if self.chance(0.4):
            schema["minimum"] = self.rng.choice((0, 1, -10, 18))
        if self.chance(0.3):
            schema["maximum"] = self.rng.choice((20, 100, 65535, 10**9))
        return schema

    def number(self) -> Schema:
        schema: Schema = {"type": "number"}
        if self.chance(0.3):
            schema |= {"minimum": self.rng.choice((0, -90, -1.5)), "maximum": self.rng.choice((1, 90, 100.25))}
        elif self.chance(0.15):
            schema |= {"minimum": 0, "exclusiveMinimum": True} if self._is_old() else {"exclusiveMinimum": 0}
        return schema

    def boolean(self) -> Schema:
        return {"type": "boolean"}

    def tagged(self, tag: str, name: str) -> Schema:
        member = self.object(1, self.rng.randint(1, 3), self.any_value)
        constant = {"enum": [name]} if self._is_old() else {"const": name}
        member["properties"] = {tag: constant} | {k: v for k, v in member["properties"].items() if k != tag}
        member["required"] = [tag, *(field for field in member["required"] if field != tag)]
        return member

    def ref(self, name: str) -> Schema:
        return {"$ref": f"#/{self.defs_key}/{name}"}

    def name(self) -> str:
        style = self.rng.random()
        if style < 0.5:
            return self.noun()
        adjective = self.rng.choice(ADJECTIVES)
        return f"{adjective}_{self.noun()}" if style < 0.75 else f"{adjective}{self.noun().title()}"

    def noun(self) -> str:
        return self.rng.choice(NOUNS)

    def phrase(self) -> str:
        return f"{self.rng.choice(ADJECTIVES)} {self.noun()} of a {self.noun()}"

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def _is_old(self) -> bool:
        return self.draft is not None and "draft-04" in self.draft

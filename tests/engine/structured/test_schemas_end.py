"""What a schema's grammar can't do is known before the first token: every construct is walked at random to its ends."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.response.grammar.key_patterns import with_listed_names
from penstock.engine.text.response.grammar.reply_grammar import reply_grammar
from penstock.engine.text.response.grammar.rules import JsonText
from tests.engine.structured.schema_corpus import Schema, schemas
from tests.engine.text.reply_walks import vocabulary
from tests.support.patience import slow

INTEGER: Schema = {"type": "integer"}
NOTHING: Schema = {"type": "string", "minLength": 5, "maxLength": 3}


def of_object(**keywords: Any) -> Schema:
    return {"type": "object", **keywords}


def closed(patterns: list[str], *names: str, **keywords: Any) -> Schema:
    """Returns a closed object with names in `properties` and in `patternProperties`."""
    known, by_pattern = dict.fromkeys(names, INTEGER), dict.fromkeys(patterns, INTEGER)
    return of_object(properties=known, patternProperties=by_pattern, additionalProperties=False, **keywords)


def referring(target: Schema) -> Schema:
    return {"$ref": "#/$defs/a", "$defs": {"a": target}}


SELF: Schema = {"$ref": "#/$defs/a"}
ENDLESS = {
    "a required part": of_object(properties={"a": SELF}, required=["a"]),
    "items": {"type": "array", "items": SELF, "minItems": 1},
    "first items": {"type": "array", "prefixItems": [INTEGER, SELF], "minItems": 2},
    "itself": SELF,
    "all branches": {"anyOf": [SELF, of_object(properties={"a": SELF}, required=["a"])]},
    "one of all": {"allOf": [{"type": "object"}, of_object(properties={"a": SELF}, required=["a"])]},
    "a property, whichever": of_object(patternProperties={"^a$": SELF}, minProperties=1, additionalProperties=False),
}
ENDING: dict[str, Schema] = {
    "a name and its pattern": closed(["^a"], "abc", required=["abc"]),
    "a pattern of one name": closed(["^abc$"], "abc", required=["abc"]),
    "the same, not required": closed(["^abc$"], "abc"),
    "several names": closed(["^(a|b[c-e])$"], "a", "bc", "bd", "be"),
    "alternatives": closed(["^a$|^bb?$"], "a", "b", "bb"),
    "one name is not listed": closed(["^[abc]$"], "a", "b"),
    "an end of one's own": closed(["a$"], "a"),
    "open, with a pattern": of_object(properties={"abc": INTEGER}, patternProperties={"^abc$": INTEGER}),
    "patterns alone": of_object(patternProperties={"^[ab]$": INTEGER}, additionalProperties=False),
    "a part that nothing follows": of_object(properties={"a": NOTHING, "b": INTEGER}, additionalProperties=False),
    "items that nothing follows": {"type": "array", "items": NOTHING},
    "a branch that nothing follows": {"anyOf": [NOTHING, INTEGER]},
    "rest that nothing follows": of_object(properties={"a": INTEGER}, additionalProperties=NOTHING),
    "recursion with a way out": referring({"anyOf": [SELF, INTEGER]}),
    "an optional part": referring(of_object(properties={"a": SELF}, additionalProperties=False)),
    "items of itself": referring({"type": "array", "items": SELF}),
} | {
    f"a part without an end: {name}": of_object(
        properties={"x": SELF, "y": INTEGER}, additionalProperties=False, **{"$defs": {"a": target}}
    )
    for name, target in ENDLESS.items()
    if target != SELF
}


def source_of(schema: Schema) -> str:
    source = reply_grammar(None, text=JsonText(json.dumps(schema)))
    assert source is not None
    return source


def check_ends(schema: Schema, num_walks: int) -> None:
    """Walks at random, towards the end more and more; checks that something may always follow, and that walks end."""
    vocabulary_ = vocabulary()
    source = source_of(schema)
    if vocabulary_.matcher(source).is_error():
        return  # refused before the first token
    walks = [vocabulary_.walk(source, random.Random(seed), max_tokens=150) for seed in range(num_walks)]
    for walk in walks:
        if walk.is_whole:
            json.loads(vocabulary_.tokenizer.decode(walk.ids))


@pytest.mark.parametrize("name", ENDING)
def test_each_construct_is_walked_to_its_ends(name: str) -> None:
    assert not vocabulary().matcher(source_of(ENDING[name])).is_error()
    check_ends(ENDING[name], num_walks=8)


@pytest.mark.parametrize("count", [10, slow(1000)])
def test_published_schemas_are_walked_to_their_ends(count: int) -> None:
    for schema in schemas(count):
        try:
            check_ends(schema, num_walks=2)
        except InvalidRequest:
            continue


@pytest.mark.parametrize("name", ENDLESS)
def test_what_no_finite_value_satisfies_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="no finite value follows it"):
        source_of(referring(ENDLESS[name]))


def test_a_listed_name_keeps_what_its_pattern_says() -> None:
    limits = {"^a$": {"minimum": 3}, "^b": {"minimum": 4}}
    made = with_listed_names(of_object(properties={"a": INTEGER, "bc": INTEGER}, patternProperties=limits))
    assert made["properties"] == {"a": {"allOf": [INTEGER, {"minimum": 3}]}, "bc": INTEGER}
    assert made["patternProperties"] == {"^b": {"minimum": 4}}

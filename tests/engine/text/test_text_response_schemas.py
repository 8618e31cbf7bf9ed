"""Most published schemas are accepted, and what their grammars allow is valid by the schema."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import validator_for

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.response.grammar import schemas as schemas_of_llguidance
from penstock.engine.text.response.grammar.reply_grammar import reply_grammar
from penstock.engine.text.response.grammar.rules import JsonText
from penstock.engine.text.response.grammar.schemas import parsed_schema
from tests.engine.structured.schema_corpus import Schema, schemas
from tests.engine.text.reply_walks import vocabulary

MIN_ACCEPTED = 0.9  # 0.935 of the corpus are


def json_schema(schema: Schema, **how: bool) -> Schema:
    made = schemas_of_llguidance.edited(schema, of="the schema of x", **how)
    return schemas_of_llguidance.with_options(made, lenient=how.get("lenient", False))


def validator_of(schema: Schema) -> Any:
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def test_a_longer_corpus_begins_with_a_shorter_one_and_its_schemas_differ() -> None:
    corpus = schemas(300)
    assert schemas(40) == corpus[:40]
    assert len({json.dumps(schema) for schema in corpus}) > 290
    text = json.dumps(corpus)
    for keyword in ("$ref", "anyOf", "oneOf", "allOf", "enum", "const", "format", "pattern", "additionalProperties"):
        assert f'"{keyword}"' in text


def check_corpus(corpus: list[Schema], num_walks: int) -> None:
    """Checks that nine of ten schemas are accepted, and that all generated values follow them."""
    accepted, ends = 0, Counter[bool]()
    for number, schema in enumerate(corpus):
        validator = validator_of(schema)
        source = reply_grammar(None, text=JsonText(json.dumps(schema)))
        assert source is not None
        if vocabulary().matcher(source).is_error():
            continue
        accepted += 1
        for turn in range(num_walks):
            walk = vocabulary().walk(source, random.Random(f"{number}/{turn}"), max_tokens=500)
            ends[walk.is_whole] += 1
            if walk.is_whole:
                validator.validate(json.loads(vocabulary().tokenizer.decode(walk.ids)))
    assert accepted >= MIN_ACCEPTED * len(corpus)
    assert ends[True] > 8 * ends[False]  # or the walks prove little


def test_of_published_schemas_nine_in_ten_are_accepted_and_their_replies_valid() -> None:
    check_corpus(schemas(100), num_walks=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_corpus() -> None:
    check_corpus(schemas(1000), num_walks=5)


@pytest.mark.parametrize(
    ("format_", "good", "bad"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("date", "0999-12-31", "0000-01-01"),
        ("date", "2000-02-29", "1900-02-29"),
        ("date-time", "2024-05-17T23:59:59Z", "2024-05-17T12:30:60Z"),
        ("date-time", "2024-05-17T23:59:59.5Z", "2024-05-17t23:59:59.5Z"),
        ("date-time", "2024-05-17T23:59:59+02:00", "2024-05-17T23:59:59z"),
        ("time", "12:30:59.25Z", "12:30:59z"),
        ("time", "12:30:59+01:00", "12:30:60Z"),
        ("ipv4", "127.0.0.1", "127.0.0.256"),
        ("topic", "anything", None),  # no format of JSON Schema's: a comment
    ],
)
def test_formats_are_held_to_as_validators_do(format_: str, good: str, bad: str | None) -> None:
    source = reply_grammar(None, text=JsonText(json.dumps({"type": "string", "format": format_})))
    assert source is not None
    assert vocabulary().accepts(source, json.dumps(good))
    assert bad is None or not vocabulary().accepts(source, json.dumps(bad))


@pytest.mark.parametrize(
    "format_", ["date", "date-time", "time", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "duration"]
)
def test_random_strings_of_a_format_are_of_that_format(format_: str) -> None:
    schema = {"type": "string", "format": format_}
    source = reply_grammar(None, text=JsonText(json.dumps(schema)))
    assert source is not None
    for seed in range(40):
        walk = vocabulary().walk(source, random.Random(seed))
        if walk.is_whole:
            validator_of(schema).validate(json.loads(vocabulary().tokenizer.decode(walk.ids)))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({}, '{"a":[1,null]}', "{"),
        ({"type": "integer"}, "-12", "1.5"),
        ({"type": "array", "uniqueItems": False}, "[1,1]", "{}"),
        ({"type": "object"}, '{\n  "a": 1\n}', '{"a":   1}'),  # white space has an end
        ({"type": "object"}, '{"a" : 1}', '{"a":\n\n1}'),
        ({"type": "string"}, '"\\n"', '"\\u0007"'),
        ({"enum": ["\x07"]}, '"\\u0007"', '"a"'),
        ({"const": "\x7f"}, '"\\u007f"', '"a"'),
        ({"enum": ["a\x7f", "b"]}, '"a\\u007f"', '"a"'),
        ({"type": "string", "pattern": "^\x7f$"}, '"\\u007f"', '"a"'),
        (
            {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"const": 1}}},
            '{"x": 1}',
            '{"x": 2}',
        ),
    ],
)
def test_what_a_schema_allows(schema: Schema, good: str, bad: str) -> None:
    source = reply_grammar(None, text=JsonText(json.dumps(schema)))
    assert source is not None
    assert vocabulary().accepts(source, good)
    assert not vocabulary().accepts(source, bad)


def test_strict_objects_are_closed_unless_they_say_otherwise() -> None:
    inner: dict[str, Any] = {"properties": {"b": {}}}
    schema = {
        "properties": {"a": inner, "open": inner | {"additionalProperties": True}},
        "items": inner,
        "anyOf": [inner],
        "$defs": {"x": inner},
        "enum": [inner],
        "properties ": inner,
    }
    closed = inner | {"additionalProperties": False}
    made = json_schema(schema, strict=True)
    assert made["properties"]["a"] == made["items"] == made["anyOf"][0] == made["$defs"]["x"] == closed
    assert made["properties"]["open"] == inner | {"additionalProperties": True}
    assert made["enum"] == [inner]  # a value, not a schema
    assert made["properties "] == inner
    assert "additionalProperties" not in made  # beside `anyOf`, what it lists is not all
    assert "additionalProperties" not in json.dumps(json_schema({"properties": {}}))


def test_what_llguidance_cannot_do_is_refused_in_its_own_words_or_left_out() -> None:
    for schema, words in (
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "null"}}, '"not"'),
        ({"type": "string", "pattern": "^(?!a).*$"}, "look-around"),
        ({"$ref": "https://example.com/schema.json"}, "retriev"),
        ({"patternProperties": {"^a": {}, "^ab": {}}}, "not disjoint"),
        ({"type": "string", "format": "uri-reference"}, "Unknown format"),
    ):
        strict = vocabulary().matcher(f"start: %json {json.dumps(json_schema(schema, strict=True))}")
        assert words in strict.get_error()
        lenient = vocabulary().matcher(f"start: %json {json.dumps(json_schema(schema, lenient=True))}")
        assert not lenient.is_error()


def test_options_in_a_schema_are_not_for_the_user_to_set() -> None:
    made = json_schema({"x-guidance": {"whitespace_flexible": True}, "items": {"x-guidance": {}}})
    assert "whitespace_flexible" not in made["x-guidance"]
    assert made["items"] == {}


@pytest.mark.parametrize("text", ["", "[1]", "null", '{"a": NaN}', '{"a": 1', '{"a": ' + "[" * 100_000])
def test_what_is_no_schema_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match="the schema of x"):
        parsed_schema(text, "the schema of x")


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: Schema = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="too deeply"):
        json_schema(schema)


def test_the_schema_itself_is_not_changed() -> None:
    schema = {"type": "object", "properties": {"a": {"format": "date", "uniqueItems": False}}, "x-guidance": {}}
    before = json.dumps(schema)
    json_schema(schema, strict=True, lenient=True, finite=True)
    assert json.dumps(schema) == before


MALFORMED = [
    {"minLength": "a"},
    {"maxLength": -1},
    {"type": 5},
    {"type": [["a"]]},
    {"type": ["string", {}]},
    {"type": []},
    {"required": 5},
    {"required": [1]},
    {"pattern": 1},
    {"enum": "a"},
    {"properties": []},
    {"anyOf": {}},
    {"items": 3},
]


@pytest.mark.parametrize("malformed", MALFORMED, ids=str)
def test_a_keyword_of_a_malformed_schema_is_refused_by_name(malformed: Schema) -> None:
    (keyword,) = malformed
    for schema in (malformed, {"items": malformed}, {"$defs": {"y": malformed}}):
        with pytest.raises(InvalidRequest, match=f"the schema of x: {keyword} can't be"):
            json_schema(schema, finite=True)


@pytest.mark.parametrize("schema", [{"required": True}, {"enum": None}, {"type": "any"}, {"properties": None}])
def test_what_clients_write_beside_the_standard_is_left_to_llguidance(schema: Schema) -> None:
    assert json_schema(schema)["x-guidance"]

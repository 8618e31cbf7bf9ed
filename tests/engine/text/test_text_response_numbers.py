"""Numbers of schemas are kept as written, compared with exact decimals in all formats and places."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.errors import InvalidRequest
from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.response.grammar.numbers import BOUNDS, Numbers, exact, positional
from penstock.engine.text.response.grammar.reply_grammar import reply_grammar
from penstock.engine.text.response.grammar.rules import CallRule, JsonText
from tests.engine.text.reply_walks import vocabulary

ID = 1234567890123456789  # as a float64 it is ...768
VALUES: tuple[float, ...] = (
    2**53 - 1, 2**53, 2**53 + 1, ID, -ID, 10**18, 2**63 - 1, 2**63, 2**64, -(2**63), 2**70 + 1, 2**255 - 19,
    0.30000000000000004, 123456789.12345679, 0.1234567890123456, 221.35757516690882, -7.62783781e-17, 1e22, 1e300,
    1, 1.0, 0, 0.1, -1.5, 10**15,
)  # fmt: skip

numbers = st.integers(-(10**25), 10**25) | st.decimals(-(10**17), 10**17, places=3).map(float) | st.floats(-2, 2)


def source_of(schema: dict[str, Any]) -> str:
    source = reply_grammar(None, text=JsonText(json.dumps(schema)))
    assert source is not None
    return source


def exactly(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


def validate(schema: dict[str, Any], text: str) -> None:
    jsonschema.Draft202012Validator(exactly(json.dumps(schema))).validate(exactly(text))


def walks(source: str, count: int) -> list[tuple[int, ...]]:
    found = [vocabulary().walk(source, random.Random(seed)) for seed in range(count)]
    return [walk.ids for walk in found if walk.is_whole]


@given(
    bounds=st.dictionaries(st.sampled_from(sorted(BOUNDS)), numbers, max_size=2),
    step=st.sampled_from([None, None, 1, 1000, 0.1, 0.001, 10**17, 7]),
    is_whole=st.booleans(),
    others=st.lists(numbers, max_size=3),
)
def test_a_lexeme_is_of_the_numbers_within_its_bounds(
    bounds: dict[str, float], step: float | None, is_whole: bool, others: list[float]
) -> None:
    allowed = Numbers.of(bounds if step is None else bounds | {"multipleOf": step}, is_whole=is_whole)
    lexeme = allowed.lexeme()
    if lexeme is None:
        assert step == 7 or any(abs(bound) < 1e-60 for bound in bounds.values())
        return
    expressions = re.findall("/(.*?)/", lexeme)
    for number in [*bounds.values(), *others]:
        for beside in (0, 1, -1, Fraction(1, 10**18), -Fraction(1, 10**18)):
            near = exact(number) + beside
            if near.denominator > 10**70:
                continue
            is_matched = all(re.fullmatch(expression, positional(near)) for expression in expressions)
            assert is_matched == (near in allowed)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_bounds_and_literals_are_those_that_are_written(value: float) -> None:
    number = exact(value)
    text, below, above = (positional(number + beside) for beside in (0, Fraction(-1, 10**20), Fraction(1, 10**20)))
    literals: list[dict[str, Any]] = [{"const": value}, {"enum": ["a", value]}, {"type": "number", "enum": [value, 7]}]
    for schema in literals:
        source = source_of(schema)
        for ids in walks(source, 4):
            validate(schema, vocabulary().tokenizer.decode(ids))
        assert vocabulary().accepts(source, json.dumps(value) if value == 1e300 else text)
        assert not vocabulary().accepts(source, positional(number + 1))
    if abs(value) >= 1e300:
        return
    for keyword, allowed in (
        ("minimum", (True, False, True)),
        ("exclusiveMinimum", (False, False, True)),
        ("maximum", (True, True, False)),
        ("exclusiveMaximum", (False, True, False)),
    ):
        schema = {"type": "number", keyword: value}
        source = source_of(schema)
        assert tuple(vocabulary().accepts(source, each) for each in (text, below, above)) == allowed, keyword
        if number.denominator == 1:
            whole = source_of({"type": "integer", keyword: int(value)})
            beside = (text, positional(number - 1), positional(number + 1))
            assert tuple(vocabulary().accepts(whole, each) for each in beside) == allowed, keyword


LONG: dict[str, dict[str, Any]] = {
    "const": {"const": ID},
    "fraction": {"const": 0.30000000000000004},
    "enum": {"enum": [ID, ID + 1, "x", None, {"a": [ID, "y"]}]},
    "minimum": {"type": "integer", "minimum": 10**18},
    "between": {"type": "integer", "minimum": ID, "exclusiveMaximum": ID + 9},
    "multiples": {"type": "integer", "minimum": ID, "maximum": ID + 100, "multipleOf": 7},
    "power of ten": {"type": "integer", "multipleOf": 10**12},
    "small": {"type": "number", "minimum": 0.1234567890123456, "maximum": 0.12345678901234562},
    "nullable": {"type": ["integer", "null"], "maximum": -(10**18)},
    "untyped": {"minimum": ID, "maxLength": 3, "maxItems": 1},
    "any of": {"anyOf": [{"const": ID}, {"type": "string", "maxLength": 2}]},
    "one of": {"oneOf": [{"const": ID}, {"const": ID + 1, "title": "b"}]},
    "all of": {"allOf": [{"type": "integer"}, {"minimum": ID}, {"maximum": ID + 3}]},
    "nested": {"const": {"a": {"b": [ID, 0.1, "\x7f", True]}, "é\n": []}},
    "list": {"type": "array", "items": {"const": ID}, "minItems": 2, "maxItems": 4},
    "empty or not": {"type": "array", "items": {"const": ID}, "maxItems": 1},
    "tuple": {"type": "array", "prefixItems": [{"const": ID}, {"type": "boolean"}], "items": False, "minItems": 1},
    "longer tuple": {"prefixItems": [{"const": ID}], "type": "array", "items": {"type": "null"}, "maxItems": 3},
    "object": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "id": {"const": ID}, "n": False, "z": {"enum": ["q"]}},
        "required": ["id", "more"],
        "additionalProperties": {"type": "integer", "minimum": ID},
    },
    "closed": {"type": "object", "properties": {"id": {"const": ID}, "b": {}}, "additionalProperties": False},
    "map": {"type": "object", "additionalProperties": {"enum": [ID]}},
    "tagged": {
        "oneOf": [
            {"type": "object", "properties": {"t": {"const": tag}, "id": {"const": id_}}, "required": ["t", "id"],
             "additionalProperties": False}
            for tag, id_ in (("a", ID), ("b", 5))
        ]
    },
}  # fmt: skip
TREE = {
    "type": "object",
    "properties": {"id": {"$ref": "#/$defs/id"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
                   "name": {"$ref": "#/properties/label"}, "label": {"type": "string", "maxLength": 2}},
    "required": ["id", "next"],
    "additionalProperties": False,
    "$defs": {"id": {"type": "integer", "minimum": ID, "maximum": ID + 5}},
}  # fmt: skip


@pytest.mark.parametrize("name", [*LONG, "tree"])
def test_what_is_generated_follows_the_schema_exactly(name: str) -> None:
    schema = TREE if name == "tree" else LONG[name]
    found = walks(source_of(schema), 12)
    assert len(found) > 3
    for ids in found:
        validate(schema, vocabulary().tokenizer.decode(ids))


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("format_", FORMATS)
def test_strict_tools_of_every_format_keep_their_numbers(format_: str, name: str) -> None:
    schema = {"type": "object", "properties": {"v": LONG[name]}, "required": ["v"], "additionalProperties": False}
    spec = ResponseSpec(format_, "", (Tool("f", json.dumps(schema), strict=True),))
    rule = CallRule(required=True, at_most_one=True)
    try:
        source = reply_grammar(spec, calls=rule, special_token_ids=vocabulary().special_token_ids)
    except InvalidRequest as refusal:
        assert "an argument needs a type in this model's format" in str(refusal)  # noqa: PT017  else it may not be
        return
    assert source is not None
    found = [ids for seed in range(2) if (ids := vocabulary().walk(source, random.Random(seed), 400)).is_whole]
    for walk in found:
        ((_, arguments),) = vocabulary().read(spec, walk.ids).calls
        validate(schema, arguments)


REFUSED: dict[str, dict[str, Any]] = {
    "multipleOf": {"type": "integer", "multipleOf": 2**53 + 1},
    "uniqueItems": {"type": "array", "items": {"const": ID}, "uniqueItems": True},
    "patternProperties": {"type": "object", "properties": {"a": {"const": ID}}, "patternProperties": {"^x": {}}},
    "minProperties": {"type": "object", "properties": {"a": {"const": ID}}, "minProperties": 1},
    "not": {"const": ID, "not": {"type": "null"}},
    "type": {"type": "object", "anyOf": [{"properties": {"a": {"const": ID}}}]},
    "allOf": {"allOf": [{"minimum": ID}, {"minimum": 5}], "type": "integer"},
    "maximum": {"type": "number", "maximum": -1e300},
    "oneOf": {"oneOf": [{"type": "integer", "minimum": ID}, {"type": "number", "maximum": 5}]},
}


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_can_t_stand_beside_a_long_number_is_refused_by_name_or_left_out(keyword: str) -> None:
    schema = {"type": "object", "properties": {"v": REFUSED[keyword]}, "required": ["v"]}
    with pytest.raises(InvalidRequest, match=rf"response_format: .*can't be kept as it is written.*{keyword}"):
        source_of(schema)
    spec = ResponseSpec("hermes", "", (Tool("f", json.dumps(schema)),))
    source = reply_grammar(spec, calls=CallRule(required=True), special_token_ids=vocabulary().special_token_ids)
    assert source is not None
    assert not vocabulary().matcher(source).is_error()


@pytest.mark.parametrize("text", ["-0", "-0.0", "0.0", "[-0.0, 9007199254740993]"])
def test_a_zero_has_no_sign_that_counts(text: str) -> None:
    schema = json.loads(f'{{"const": {text}}}')
    for ids in walks(source_of(schema), 2):
        assert exactly(vocabulary().tokenizer.decode(ids)) == exactly(text)


@pytest.mark.parametrize("text", ['{"const": 1e400}', '{"type": "number", "minimum": -1e999}'])
def test_a_number_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is more than a number can be"):
        reply_grammar(None, text=JsonText(text))

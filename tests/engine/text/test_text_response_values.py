"""Values in calls: JSON as it arrives, Python literals, bare keys, and text cast by a schema."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.text.response.grammar.schemas import pointed
from penstock.engine.text.response.reading import casting
from penstock.engine.text.response.reading.casting import MAX_NODES, ArgumentsSchema
from penstock.engine.text.response.reading.json_text import read_value, to_json
from penstock.engine.text.response.reading.literals import MAX_DEPTH, read_literal
from penstock.engine.text.response.reading.source import Malformed, Reading, TextCursor

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
python_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def read(text: str, reading: Callable[[TextCursor], Reading[Any]]) -> tuple[object, str]:
    """Returns the result of a reading that gets `text` character by character, and the rest."""
    source = TextCursor("")
    running = reading(source)
    place = 0
    try:
        for place, character in enumerate(text, start=1):
            source.push(character)
            if place == len(text):
                source.end()
            next(running)
    except StopIteration as end:
        return end.value, source.rest() + text[place:]
    raise AssertionError("a reading ends with its source")


def json_of(text: str) -> str:
    parts: list[str] = []
    _, rest = read(text + "$", lambda source: read_value(source, parts.append))
    assert rest == "$"
    return "".join(parts)


@given(value=json_values, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_json_goes_through_as_it_is(value: object, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert json_of(text) == text


@given(text=st.text('{}[]",:0123456789.eE+-truefalsn\\u \n', max_size=15))
@settings(max_examples=300)
def test_json_is_what_pythons_parser_takes(text: str) -> None:
    try:
        expected: object = json.loads(text)
    except ValueError:
        expected = Malformed
    try:
        found: object = json.loads(json_of(text.strip()))
    except (Malformed, AssertionError):
        found = Malformed
    assert found == expected or "\n" in text  # within a string, which Python does not take


@pytest.mark.parametrize(
    "text", ["01", "1.", "+1", "nul", "NaN", '{"a" 1}', "[1,]", "{,}", '"\\x"', '"\\u12g4"', "[}", '"\ud800"']
)
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        json_of(text)


def test_line_breaks_in_strings_are_escaped() -> None:
    assert json_of('{"a\t": "b\n"}') == '{"a\\t": "b\\n"}'


def test_json_of_half_a_character_is_ascii() -> None:
    assert to_json("é") == '"é"'
    assert to_json("é\ud800") == '"\\u00e9\\ud800"'


@given(value=python_values)
def test_python_values_are_read(value: object) -> None:
    assert read(repr(value) + ")", read_literal) == (value, ")")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("null", None),
        ("('a', )", ["a"]),
        ("{'a': [1, {'b': -2.5e3}]}", {"a": [1, {"b": -2500.0}]}),
        (r"'\x41\u00e9\U0001F600\d\'\n\0'", "Aé😀\\d'\n\0"),
        ("+7", 7),
        (".5", 0.5),
    ],
)
def test_what_else_python_writes_is_read(text: str, value: object) -> None:
    assert read(text + ",", read_literal) == (value, ",")


@pytest.mark.parametrize(
    "text", ["x", "f()", "{1: 2}", "'a", "1e999", "", "[" * (MAX_DEPTH + 2), "'\\U00110000'", "'\ud800'"]
)
def test_what_is_no_python_value_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        read(text + ",", read_literal)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{city:`Paris, {x}`,n:[1,true],`a b`:null}", {"city": "Paris, {x}", "n": [1, True], "a b": None}),
        ('{a: Paris , b:"x\\n"}', {"a": "Paris", "b": "x\n"}),
        ("{}", {}),
        ("12", 12),
    ],
)
def test_bare_keys_and_quotes_of_their_own_are_read(text: str, value: object) -> None:
    assert read(text + ",", lambda source: read_literal(source, "`")) == (value, ",")


SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "referred": {"$ref": "#/$defs/Place"},
        "circle": {"$ref": "#/properties/circle"},
        "choice": {"enum": ["1", "2"]},
        "anything": {},
    },
    "$defs": {"Place": {"type": "object"}},
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "12", "12"),
        ("text", " a\n", " a\n"),
        ("count", "12", 12),
        ("count", "12.0", 12.0),
        ("count", "many", "many"),
        ("count", "true", "true"),
        ("ratio", "1.5", 1.5),
        ("ratio", "NaN", "NaN"),
        ("ratio", "1e999", "1e999"),
        ("flag", "true", True),
        ("flag", "True", True),
        ("items", "[1, 2]", [1, 2]),
        ("items", "{}", "{}"),
        ("maybe", "null", None),
        ("maybe", "nil", "nil"),
        ("either", "12", 12),
        ("either", "twelve", "twelve"),
        ("referred", '{"a": 1}', {"a": 1}),
        ("circle", "12", 12),
        ("choice", "1", "1"),
        ("anything", "12", 12),
        ("anything", "twelve", "twelve"),
        ("unknown", "[1]", [1]),
    ],
)
def test_text_becomes_what_the_schema_says(name: str, text: str, value: object) -> None:
    found = ArgumentsSchema(json.dumps(SCHEMA)).cast(name, text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("schema", ["", "[]", "{", "true", '{"properties": 1}', "[" * 100_000])
def test_a_schema_that_says_nothing_lets_everything_through(schema: str) -> None:
    assert ArgumentsSchema(schema).cast("a", "1") == 1


def recursive_union(width: int) -> dict[str, Any]:
    branches = [{"$ref": "#/$defs/v"}] * width + [{"type": "integer"}]
    return {"properties": {"v": {"$ref": "#/$defs/v"}}, "$defs": {"v": {"anyOf": branches}}}


@pytest.mark.timeout(30)
def test_a_recursive_union_is_walked_once() -> None:
    """Walking its branches to the eighth power would take hours."""
    schema = ArgumentsSchema(json.dumps(recursive_union(40)))
    for _ in range(1000):
        assert schema.cast("v", "12") == 12
    assert schema.cast("v", "[1]") == "[1]"


def test_a_union_of_too_many_branches_allows_anything() -> None:
    for count, value in ((MAX_NODES - 1, "[1]"), (MAX_NODES, [1])):
        union = {"anyOf": [{"type": "integer"} for _ in range(count)]}
        assert ArgumentsSchema(json.dumps({"properties": {"v": union}})).cast("v", "[1]") == value


@pytest.mark.parametrize(
    ("values", "text", "value"),
    [
        ([*range(5000)], "7", 7),
        ([*range(5000)], "x", "x"),
        ([str(number) for number in range(5000)], "7", "7"),
        ([*range(5000), None, "a"], "null", None),
        ([*range(5000), 1.5], "2.5", 2.5),
    ],
)
def test_of_a_long_enumeration_the_types_count_and_no_value_is_kept(
    values: list[Any], text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[object] = []
    original = casting._is_a

    def compare(one: object, kind: str) -> bool:
        compared.append(one)
        return original(one, kind)

    monkeypatch.setattr(casting, "_is_a", compare)
    schema = ArgumentsSchema(json.dumps({"properties": {"x": {"enum": values}}}))
    assert schema.cast("x", text) == value
    assert len(compared) < 10
    assert not schema._known["x"].texts
    assert not schema._known["x"].values


def test_a_reference_of_many_steps_leads_nowhere_and_costs_nothing() -> None:
    root: dict[str, Any] = {"a": {"b/c": 1, "": {"~": 2}}}
    assert (pointed(root, "#/a/b~1c"), pointed(root, "#/a//~0"), pointed(root, "#")) == (1, 2, root)
    tracemalloc.start()
    try:
        assert pointed(root, "#" + "/a" * 500_000) is None
        assert tracemalloc.get_traced_memory()[1] < 10_000_000  # not a step each
    finally:
        tracemalloc.stop()

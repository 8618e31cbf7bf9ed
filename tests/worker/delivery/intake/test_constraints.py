"""The fields of a request become the rules that its reply follows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engine.errors import InvalidRequest
from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.text.response.grammar.rules import CallRule, ChoiceText, JsonText, LarkText, RegexText
from penstock.protocol.wire import GenerateRequest
from penstock.worker.intake.constraints import call_rule, callable_tools, grammar_source, text_rule

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
NAMED = {"type": "function", "function": {"name": "g"}}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def asked(**fields: Any) -> GenerateRequest:
    return GenerateRequest(messages=({"role": "user", "content": "x"},), **fields)


def with_tools(**fields: Any) -> GenerateRequest:
    return asked(tools=[tool("f", parameters=SCHEMA, strict=True), tool("g")], **fields)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonText()),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            JsonText(json.dumps(SCHEMA)),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
            JsonText(json.dumps(SCHEMA), strict=True),
        ),
        ({"regex": "a+"}, RegexText("a+")),
        ({"choice": ["yes", "no"]}, ChoiceText(("yes", "no"))),
        ({"grammar": 'start: "a"'}, LarkText('start: "a"')),
    ],
)
def test_what_the_text_must_be(fields: dict[str, Any], rule: object) -> None:
    assert text_rule(asked(**fields)) == rule


@pytest.mark.parametrize(
    ("fields", "rule", "names"),
    [
        ({}, CallRule(), ["f", "g"]),
        ({"tool_choice": "auto"}, CallRule(), ["f", "g"]),
        ({"tool_choice": "none"}, CallRule(restricted=True), []),
        ({"tool_choice": "required"}, CallRule(required=True), ["f", "g"]),
        ({"parallel_tool_calls": False}, CallRule(at_most_one=True), ["f", "g"]),
        ({"tool_choice": NAMED}, CallRule(required=True, at_most_one=True, restricted=True), ["g"]),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [NAMED]}}},
            CallRule(restricted=True),
            ["g"],
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}},
            CallRule(required=True, restricted=True),
            ["g"],
        ),
    ],
)
def test_which_calls_there_may_be(fields: dict[str, Any], rule: CallRule, names: list[str]) -> None:
    request = with_tools(**fields)
    assert call_rule(request) == rule
    assert [tool.name for tool in callable_tools(request)] == names


def test_where_several_calls_are_not_read_a_grammar_allows_one() -> None:
    assert call_rule(asked(tools=[tool("g")], tool_choice="required"), reads_several=False).at_most_one
    assert call_rule(with_tools(), reads_several=False).at_most_one  # of a strict tool
    assert call_rule(asked(tools=[tool("g")]), reads_several=False) == CallRule()


def test_tools_come_with_their_schemas() -> None:
    assert callable_tools(with_tools()) == (Tool("f", json.dumps(SCHEMA), strict=True), Tool("g"))


def test_a_grammar_is_written_where_something_constrains_the_reply() -> None:
    response = ResponseSpec("hermes", tools=callable_tools(with_tools()))
    assert grammar_source(asked(), ResponseSpec("hermes"), {}, has_reasoning=True) is None
    assert grammar_source(asked(), None, {}, has_reasoning=False) is None
    source = grammar_source(with_tools(tool_choice="required"), response, {"<tool_call>": 7}, has_reasoning=True)
    assert source is not None
    assert "<[7]>" in source or "<tool_call>" in source
    plain = grammar_source(asked(choice=["yes"]), response, {}, has_reasoning=True)
    assert plain is not None
    assert plain != grammar_source(asked(choice=["yes"]), response, {}, has_reasoning=False)


def test_a_call_that_the_model_cannot_make_cannot_be_required() -> None:
    with pytest.raises(InvalidRequest, match="tool_choice requires a call"):
        grammar_source(with_tools(tool_choice="required"), None, {}, has_reasoning=False)


def test_a_strict_tool_that_nothing_can_be_held_to_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="f is strict, but this model has no known format of calls"):
        grammar_source(with_tools(), None, {}, has_reasoning=False)
    assert grammar_source(with_tools(tool_choice="none"), None, {}, has_reasoning=False) is None
    assert grammar_source(asked(tools=[tool("g")], parallel_tool_calls=False), None, {}, has_reasoning=False) is None

"""Any JSON in any field of a response request gives a request for the queue, or one error that names the field."""

from __future__ import annotations

import asyncio
import json
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from penstock.gateway.errors import ApiError
from penstock.gateway.responses.create import with_input
from penstock.gateway.responses.input.item import InputItem
from penstock.gateway.responses.input.items import read_items, shown_items, to_messages
from penstock.gateway.responses.request import RESPONSE_POLICY, ResponseBody, read_response
from penstock.gateway.responses.stored import asked_for
from penstock.producer import GenerateRequest
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire.values import check_json
from tests.gateway.responses.responses_harness import asking
from tests.support.any_json import mutations, values
from tests.support.documented_fields import honoured_by, ignored_for, refused_for, written
from tests.support.programs.gateway_harness import CARD

BODY: dict[str, Any] = {"model": "tiny", "input": "say it"}
NAMES = sorted({*RESPONSE_POLICY.honoured, *RESPONSE_POLICY.ignored, *RESPONSE_POLICY.refused, "nobody_knows"})

TOOL = {"type": "function", "name": "noon", "parameters": {"type": "object"}, "strict": True, "description": "d"}
WHOLE: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}], "id": "a"},
        {"type": "reasoning", "id": "b", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c", "name": "noon", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": "12"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}]},
        {"type": "local_shell_call", "id": "d", "call_id": None, "action": {"type": "exec", "command": ["ls"]}},
        {"type": "shell_call_output", "call_id": "d", "output": [{"stdout": "a", "outcome": {"type": "timeout"}}]},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "shell"}]},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "noon"}]},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "background_options": {"completion_window": "2h"},
}


def answer(body: dict[str, Any]) -> ApiError | GenerateRequest:
    checked = check_json(body)
    try:
        asked, items = with_input(read_response(checked))
        request = asked.request(to_messages(items), CARD)
    except ApiError as error:
        refused = error
    else:
        _check_kept(asked, items)
        return request
    assert refused.status == 400
    assert refused.message
    assert json.dumps(refused.body())
    return refused


def _check_kept(asked: ResponseBody, items: list[InputItem]) -> None:
    """Checks that what is kept of a request can be kept, and says the same when it is read again."""
    assert json.dumps(asked_for(asked))
    again = read_items(shown_items(items, "r"))
    assert to_messages(again) == to_messages(items)


@given(st.dictionaries(st.sampled_from(NAMES), values, max_size=3))
def test_any_value_in_any_field_is_taken_or_refused(given: dict[str, Any]) -> None:
    answer({**BODY, **given})


@pytest.mark.parametrize("field", WHOLE)
def test_any_value_inside_a_field_is_taken_or_refused(field: str) -> None:
    body = {**BODY, "tools": [TOOL], "background": True}
    assert isinstance(answer({**body, field: WHOLE[field]}), GenerateRequest)

    @given(st.data())
    def check(data: st.DataObject) -> None:
        answer({**body, field: data.draw(mutations(WHOLE[field]))})

    check()


def test_every_field_of_the_official_client_has_a_policy() -> None:
    policy = RESPONSE_POLICY
    named = {*policy.honoured, *policy.ignored, *policy.refused}
    assert set(get_type_hints(ResponseCreateParamsNonStreaming)) <= named
    assert len(policy.honoured) + len(policy.ignored) + len(policy.refused) == len(named)


@pytest.mark.parametrize(
    ("given", "param", "code", "says"),
    [
        ({"temprature": 1}, "temprature", "unknown_parameter", "did you mean temperature?"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter", "previous_response_id"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter", "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value", "0"),
        ({"max_output_tokens": "5"}, "max_output_tokens", "invalid_type", "'5'"),
        ({"min_tokens": 50, "max_output_tokens": 5}, None, "invalid_value", "min_tokens 50"),
        ({"input": 5}, "input", "invalid_type", "text or a list"),
        ({"input": []}, "input", "invalid_value", "input: is empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_value", "item_reference"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter", "Field required"),
        ({"input": [{"role": "bot", "content": "a"}]}, "input[0].role", "invalid_value", "bot"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "input[0].content[0].type", "unsupported_value", "input[0].content[0]: a part of type 'input_image'",
        ),
        (
            {"input": [{"role": "user", "content": "a"}, {"type": "function_call", "call_id": "c"}]},
            "input[1].name", "missing_required_parameter", "Field required",
        ),
        ({"tools": [{"type": "functon"}]}, "tools[0].type", "unsupported_value", "did you mean function?"),
        ({"tools": [{"type": 5}]}, "tools[0].type", "unsupported_value", "5"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter", "name"),
        ({"tools": [{**TOOL, "parametres": {}}]}, "tools[0].parametres", "unknown_parameter", "parameters"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{**TOOL, "descripton": "d"}]}]},
            "tools[0].tools[0].descripton", "unknown_parameter", "did you mean description?"),
        ({"tools": [TOOL, TOOL]}, "tools", "invalid_value", "noon is given more than once"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "unsupported_value", "allowed_tools"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value", "no tools"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value", "huge"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "invalid_value", "long"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "invalid_value", "yaml"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a"}}},
            "text.format", "missing_required_parameter", "schema",
        ),
        ({"include": ["everything"]}, "include[0]", "invalid_value", "everything"),
        ({"top_logprobs": 21}, "top_logprobs", "invalid_value", "21"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "invalid_value", "512"),
        ({"background": True, "store": False}, "background", "invalid_value", "stored"),
        ({"background_options": {"completion_window": "2h"}}, "background_options", "invalid_value", "background"),
        ({"n": 2}, "n", "unsupported_parameter", "one answer"),
    ],
)  # fmt: skip
def test_an_error_names_the_field(given: dict[str, Any], param: str | None, code: str, says: str) -> None:
    refused = answer({**BODY, **given})
    assert isinstance(refused, ApiError)
    assert (refused.code, says in refused.message) == (code, True), refused.message
    assert (refused.param or "").startswith(param or "")


def test_a_window_is_a_time_limit_with_the_lowest_priority() -> None:
    request = answer({**BODY, "background": True, "background_options": {"completion_window": "2h"}})
    assert isinstance(request, GenerateRequest)
    assert (request.timeout_s, request.priority) == (7200, -1000)


WRONG: list[Any] = ["x", -1, 2**70, True, [[]], {"x": {}}]


async def test_a_gateway_outlives_what_is_in_any_field(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url) as asked:
        for name in NAMES:
            bodies = [{**BODY, name: value} for value in WRONG]
            for response in await asyncio.gather(*(asked.http.post("/v1/responses", json=body) for body in bodies)):
                assert response.status_code in (200, 400, 404), (name, response.text)
                if response.status_code != 200:
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert (await asked.post("say it")).status_code == 200


def test_the_docs_list_every_field() -> None:
    assert ignored_for("responses") == RESPONSE_POLICY.ignored
    assert refused_for("responses") == {name: written(each.neutral) for name, each in RESPONSE_POLICY.refused.items()}
    assert RESPONSE_POLICY.honoured <= honoured_by("responses")

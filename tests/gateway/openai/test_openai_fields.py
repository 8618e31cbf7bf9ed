"""Any JSON in any field of a request gives a request for the queue, or one error that names the field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams

from penstock.gateway.common.fields import Policy
from penstock.gateway.errors import ApiError
from penstock.gateway.openai.chat_request import CHAT_POLICY, read_chat
from penstock.gateway.openai.completion_request import COMPLETION_POLICY, read_completion
from penstock.producer import GenerateRequest
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import PARAMETERS, ResponseFormat
from penstock.protocol.wire.values import check_json
from tests.gateway.openai.openai_clients import HELLO, asking
from tests.support.any_json import mutations, values
from tests.support.documented_fields import honoured_by, ignored_for, refused_for, written
from tests.support.programs.gateway_harness import CARD

CHAT = {"model": "tiny", "messages": HELLO}
COMPLETION = {"model": "tiny", "prompt": "hello"}

KINDS_OF_TYPES: Mapping[Any, tuple[type, ...]] = {
    int | bool: (int,), float: (float, int), Sequence[int]: (list,), Sequence[str]: (str, list),
    str | Sequence[str]: (str, list), Mapping[int, float]: (dict,), Mapping[str, Any]: (dict,),
    Sequence[Mapping[str, Any]]: (list,), ResponseFormat | Mapping[str, Any]: (dict,),
}  # fmt: skip
KINDS: Mapping[str, tuple[type, ...]] = {
    **{name: KINDS_OF_TYPES.get(each.type, (each.type,)) for name, each in PARAMETERS.items()},
    **dict.fromkeys(
        ("stream", "return_token_ids", "return_tokens_as_token_ids", "include_reasoning", "enable_thinking"), (bool,)
    ),
    **dict.fromkeys(("max_completion_tokens", "top_logprobs", "best_of"), (int,)),
    **dict.fromkeys(("model", "prompt_cache_key", "guided_regex", "guided_grammar"), (str,)),
    **dict.fromkeys(("stream_options", "structured_outputs"), (dict,)),
    **dict.fromkeys(("prompt", "guided_choice"), (str, list)),
    **dict.fromkeys(("guided_json", "tool_choice"), (str, dict)),
    "messages": (list,),
    "thinking": (bool, dict),
}
OF_ONE_API = {"logprobs"}  # its type differs in each


def chat(body: dict[str, Any]) -> GenerateRequest:
    return read_chat(body).request(CARD)


def completion(body: dict[str, Any]) -> GenerateRequest:
    return read_completion(body).requests()[0]


APIS: list[tuple[Policy, Callable[[dict[str, Any]], GenerateRequest], dict[str, Any]]] = [
    (CHAT_POLICY, chat, CHAT),
    (COMPLETION_POLICY, completion, COMPLETION),
]
NAMES = ["chat", "completions"]


def names_of(policy: Policy) -> list[str]:
    return sorted({*policy.honoured, *policy.ignored, *policy.refused, "nobody_knows"})


def answer(read: Callable[[dict[str, Any]], GenerateRequest], body: dict[str, Any]) -> ApiError | GenerateRequest:
    checked = check_json(body)
    try:
        return read(checked)
    except ApiError as error:
        answered = error
    assert answered.status == 400
    assert answered.message
    assert json.dumps(answered.body())
    return answered


@pytest.mark.parametrize(("policy", "read", "body"), APIS, ids=NAMES)
def test_any_value_in_any_field_is_taken_or_refused(policy: Policy, read: Any, body: dict[str, Any]) -> None:
    @given(st.dictionaries(st.sampled_from(names_of(policy)), values, max_size=3))
    def check(given: dict[str, Any]) -> None:
        answer(read, {**body, **given})

    check()


@pytest.mark.parametrize(("policy", "read", "body"), APIS, ids=NAMES)
def test_a_value_of_another_kind_is_refused_by_its_name(policy: Policy, read: Any, body: dict[str, Any]) -> None:
    assert KINDS.keys() >= policy.honoured

    @given(st.sampled_from(sorted(policy.honoured - OF_ONE_API)), values.filter(lambda value: value is not None))
    def check(name: str, value: Any) -> None:
        if type(value) not in KINDS[name]:
            refused = answer(read, {**body, name: value})
            assert isinstance(refused, ApiError)
            assert (refused.param or "").startswith(name)
            assert refused.code in ("invalid_type", "invalid_value")

    check()


@pytest.mark.parametrize(
    "field", ["messages", "tools", "tool_choice", "response_format", "stream_options", "logit_bias"]
)
def test_any_value_inside_a_field_is_taken_or_refused(field: str) -> None:
    tool = {"type": "function", "function": {"name": "noon", "parameters": {"type": "object"}, "strict": True}}
    call = {"id": "c", "type": "function", "function": {"name": "noon", "arguments": "{}"}}
    whole: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "so", "refusal": None},
            {"role": "tool", "content": "12", "tool_call_id": "c"},
        ],
        "tools": [tool],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool]}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        "stream_options": {"include_usage": True},
        "logit_bias": {"5": 1.5},
    }

    @given(st.data())
    def check(data: st.DataObject) -> None:
        changed = data.draw(mutations(whole[field]))
        answer(chat, {**CHAT, "tools": [tool], "stream": True, field: changed})

    check()


@pytest.mark.parametrize(
    ("policy", "params"), [(CHAT_POLICY, ChatParams), (COMPLETION_POLICY, CompletionParams)], ids=NAMES
)
def test_every_field_of_the_official_client_has_a_policy(policy: Policy, params: Any) -> None:
    named = {*policy.honoured, *policy.ignored, *policy.refused}
    assert set(get_type_hints(params)) <= named
    kinds = (policy.honoured, policy.ignored.keys(), policy.refused.keys())
    assert sum(map(len, kinds)) == len(named)


USER = {"role": "user", "content": "hello"}
TEXT = {"type": "text", "text": "hello"}
IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]


@pytest.mark.parametrize(
    ("given", "param", "code", "says"),
    [
        ({"temprature": 1}, "temprature", "unknown_parameter", "did you mean temperature?"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "unsupported_value", "/v1/responses"),
        ({"prompt": "hi"}, "prompt", "unsupported_parameter", "prompt"),
        ({"temperature": 200}, "temperature", "invalid_value", "200"),
        ({"temperature": "hot"}, "temperature", "invalid_type", "'hot'"),
        ({"n": True}, "n", "invalid_type", "not true"),
        ({"n": 1.5}, "n", "invalid_type", "1.5"),
        ({"max_tokens": 10**4000}, "max_tokens", "invalid_value", "less than 2147483648"),
        ({"stop_token_ids": [10**4000]}, "stop_token_ids[0]", "invalid_value", "less than 2147483648"),
        ({"messages": None}, "messages", "missing_required_parameter", "Field required"),
        ({"messages": []}, "messages", "invalid_value", "messages: is empty"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type", "5"),
        ({"messages": IMAGE}, "messages[0].content[0]", "invalid_value", "'image_url' is not supported"),
        ({"messages": [USER, {"role": "user", "content": [TEXT, {"type": "text"}]}]},
            "messages[1].content[1].text", "missing_required_parameter", "messages[1].content[1].text: Field required"),
        ({"messages": {"role": "user", "content": "sparrow"}}, "messages", "invalid_type", "valid list, not an object"),
        ({"messages": [USER, ["sparrow"]]}, "messages[1]", "invalid_type", "valid object, not a list"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a", "invalid_value", "logit_bias.a: Input should be a valid integer"),
        ({"logprobs": "yes"}, "logprobs", "invalid_type", "logprobs: Input should be a valid boolean, not 'yes'"),
        ({"stop": 5}, "stop", "invalid_type", "stop: must be a string or a list of strings, not 5"),
        ({"stop": ["a", None]}, "stop[1]", "invalid_type", "stop[1]: Input should be a valid string, not null"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}},
            "tool_choice.allowed_tools.tools", "invalid_value", "tools: List should have at least 1 item, not 0"),
        ({"tool_choice": {"type": "allowed_tools", "alowed_tools": {}}}, "tool_choice.alowed_tools",
            "unknown_parameter", "tool_choice: unknown field alowed_tools, did you mean allowed_tools?"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio", "unsupported_parameter",
            "messages[0]: audio: contents are text"),
        ({"tool_choice": "always"}, "tool_choice", "invalid_value", "must be none, auto, required"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value", "no tools"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value", "stream"),
        (
            {"stream": True, "stream_options": {"includes_usage": True}},
            "stream_options.includes_usage", "unknown_parameter", "did you mean include_usage?",
        ),
        ({"regex": "a", "guided_regex": "b"}, "regex", "invalid_value", "twice"),
        ({"regex": "a", "choice": ["b"]}, None, "invalid_value", "regex and choice"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, None, "invalid_value", "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value", "top_logprobs"),
        ({"seed": -(2**63) - 1}, "seed", "invalid_value", "seed"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_value", "yaml"),
        ({"functions": [{"name": "a"}]}, "functions", "unsupported_parameter", "use tools"),
    ],
)  # fmt: skip
def test_an_error_names_the_field(given: dict[str, Any], param: str | None, code: str, says: str) -> None:
    refused = answer(chat, {**CHAT, **given})
    assert isinstance(refused, ApiError)
    assert (refused.param, refused.code) == (param, code)
    assert says in refused.message
    assert "sparrow" not in refused.message


WRONG: list[Any] = ["x", -1, 2**70, True, [[]], {"x": {}}]


@pytest.mark.parametrize(
    ("path", "policy", "body"),
    [("/v1/chat/completions", CHAT_POLICY, CHAT), ("/v1/completions", COMPLETION_POLICY, COMPLETION)],
    ids=NAMES,
)
async def test_a_gateway_outlives_what_is_in_any_field(
    redis: RedisClient, redis_url: str, path: str, policy: Policy, body: dict[str, Any]
) -> None:
    async with asking(redis, redis_url) as asked:
        for name in names_of(policy):
            given = [value for value in WRONG if (name, value) != ("return_token_ids", True)]  # nobody tokenizes here
            for response in await asyncio.gather(*(asked.post(path, {**body, name: value}) for value in given)):
                assert response.status_code in (200, 400, 404), (name, response.text)
                if response.status_code != 200:
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert (await asked.post(path, body)).status_code == 200


@pytest.mark.parametrize("policy", [CHAT_POLICY, COMPLETION_POLICY], ids=NAMES)
def test_the_docs_list_every_field(policy: Policy) -> None:
    whose = "chat" if policy is CHAT_POLICY else "completions"
    assert ignored_for(whose) == policy.ignored
    assert refused_for(whose) == {name: written(refusal.neutral) for name, refusal in policy.refused.items()}
    assert policy.honoured <= honoured_by(whose)

"""Unknown fields are passed over and said, or refused where they look like misspelled ones, at every depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import structlog

from penstock.gateway.anthropic.request import MESSAGE_POLICY, read_message
from penstock.gateway.common.fields import Policy
from penstock.gateway.common.near import FEWEST_LETTERS, nearest
from penstock.gateway.errors import ApiError
from penstock.gateway.http.passed_over import HEADER, MAX_NAMES, PassedOver, reading_fields
from penstock.gateway.openai.chat_request import CHAT_POLICY, read_chat
from penstock.gateway.openai.completion_request import COMPLETION_POLICY, read_completion
from penstock.gateway.responses.input.items import read_items
from penstock.gateway.responses.request import RESPONSE_POLICY, read_response
from penstock.protocol.redis.connection import RedisClient
from tests.gateway.openai.openai_clients import asking
from tests.support.programs.gateway_harness import CARD

SAYS: Any = [{"role": "user", "content": "hello"}]
UNRELATED = ("next_months_key", "a_tool", "zz")


class Api(NamedTuple):
    path: str
    policy: Policy
    read: Callable[[Mapping[str, Any]], object]
    body: dict[str, Any]


def _response(body: Mapping[str, Any]) -> object:
    asked = read_response(body)
    return read_items(asked.input)


APIS = {
    "chat": Api("/v1/chat/completions", CHAT_POLICY, lambda body: read_chat(body).request(CARD),
        {"model": "tiny", "messages": SAYS}),
    "completions": Api("/v1/completions", COMPLETION_POLICY, lambda body: read_completion(body).requests(),
        {"model": "tiny", "prompt": "hello"}),
    "responses": Api("/v1/responses", RESPONSE_POLICY, _response, {"model": "tiny", "input": "hello"}),
    "messages": Api("/v1/messages", MESSAGE_POLICY, lambda body: read_message(body).request(),
        {"model": "tiny", "max_tokens": 4, "messages": SAYS}),
}  # fmt: skip


def known(policy: Policy) -> set[str]:
    return {*policy.honoured, *policy.ignored, *policy.refused}


def misspelled(name: str) -> Iterator[str]:
    """Yields every name that lacks a character or has two in each other's place, and some with one more or another."""
    for place in range(len(name)):
        yield name[:place] + name[place + 1 :]
        yield f"{name[:place]}q{name[place:]}"
        yield f"{name[:place]}q{name[place + 1 :]}"
    for place, (one, other) in enumerate(pairwise(name)):
        yield f"{name[:place]}{other}{one}{name[place + 2 :]}"


def policies(policy: Policy, place: str = "") -> Iterator[tuple[str, Policy]]:
    yield place, policy
    for name, inner in policy.inner.items():
        yield from policies(inner, f"{place}.{name}" if place else name)


def inside(place: str, value: Any) -> Any:
    """Returns a body with `value` at a place."""
    for name in reversed(place.split(".") if place else []):
        value = {name: value}
    return value


PLACES = [
    pytest.param(api, place, policy, id=f"{name} {place}".strip())
    for name, api in APIS.items()
    for place, policy in policies(api.policy)
]


@pytest.mark.parametrize(("api", "place", "policy"), PLACES)
def test_a_misspelled_field_is_refused_with_the_name_that_was_meant(api: Api, place: str, policy: Policy) -> None:
    for name in known(policy):
        for other in set(misspelled(name)) - known(policy):
            meant = nearest(other, known(policy))
            assert (meant is not None) or sum(map(str.isalpha, name)) < FEWEST_LETTERS
            with reading_fields(is_strict=False) as notes:
                if meant is None:
                    api.policy.honoured_of(inside(place, {other: 1}))
                    assert notes.said == (f"{place}.{other}" if place else other)
                    continue
                with pytest.raises(ApiError, match=f"unknown field {other}, did you mean ") as caught:
                    api.policy.honoured_of(inside(place, {other: 1}))
                assert caught.value.code == "unknown_parameter"
                assert caught.value.param == (f"{place}.{other}" if place else other)


@pytest.mark.parametrize(("api", "place", "policy"), PLACES)
def test_an_unrelated_field_is_passed_over_and_said_or_refused_where_fields_are_strict(
    api: Api, place: str, policy: Policy
) -> None:
    for name in UNRELATED:
        with reading_fields(is_strict=False) as notes:
            assert name not in str(api.policy.honoured_of(inside(place, {name: 1})))
        assert notes.said == (f"{place}.{name}" if place else name)
        with reading_fields(is_strict=True), pytest.raises(ApiError) as caught:
            api.policy.honoured_of(inside(place, {name: 1}))
        assert caught.value.code == "unknown_parameter"


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
@pytest.mark.parametrize("name", ["client_metadata", "thread", "speed", "next_months_key"])
def test_keys_of_other_programs_are_not_taken_for_ours(api: Api, name: str) -> None:
    if name not in api.policy.refused:
        api.read({**api.body, name: {"a": 1}})


PART = {"type": "text", "text": "a", "contnet": 1}
HISTORY: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"messages": [{"role": "user", "content": "a", "contnet": 1}]}, "messages.contnet"),
    ("chat", {"messages": [{"role": "user", "content": [PART]}]}, "messages.content.contnet"),
    ("chat", {"messages": [{"role": "assistant", "content": "a", "reasonin": 1}]}, "messages.reasonin"),
    ("messages", {"messages": [{"role": "user", "content": "a", "contnet": 1}]}, "messages.contnet"),
    ("messages", {"messages": [{"role": "user", "content": [PART]}]}, "messages.content.contnet"),
    ("messages", {"system": [PART]}, "system.contnet"),
    ("responses", {"input": [{"role": "user", "content": "a", "contnet": 1}]}, "input.contnet"),
    ("responses", {"input": [{"role": "user", "content": [PART]}]}, "input.content.contnet"),
]


@pytest.mark.parametrize(("api", "fields", "said"), HISTORY)
def test_what_messages_parts_and_items_have_besides_is_always_passed_over(
    api: str, fields: dict[str, Any], said: str
) -> None:
    with reading_fields(is_strict=False) as notes:
        APIS[api].read({**APIS[api].body, **fields})
    assert notes.said == said


def test_the_keys_of_a_schema_are_no_fields() -> None:
    schema = {"type": "object", "propertis": {}, "parametres": 1}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with reading_fields(is_strict=True) as notes:
        read = read_chat({**APIS["chat"].body, "tools": [tool], "response_format": form, "metadata": {"modle": "a"}})
    assert read.tools == [tool]  # type: ignore[attr-defined]
    assert notes.said == "metadata"


def test_names_are_bounded_and_safe_for_a_header() -> None:
    notes = PassedOver()
    for number in range(MAX_NAMES + 5):
        notes.add(f"messages[{number}].a\r\nb: é{number}" + "x" * 100)
    notes.add("messages[7].again")
    *names, rest = notes.said.split(", ")
    assert len(names) == MAX_NAMES
    assert rest == "+6"
    assert all(len(name) <= 64 and name.isascii() and name.isprintable() for name in names)
    assert names[0].startswith("messages.a??b???0x")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_the_answer_and_the_log_say_what_was_passed_over(
    redis: RedisClient, redis_url: str, streamed: bool
) -> None:
    name = f"key_of_{streamed}"
    async with asking(redis, redis_url) as asked:
        with structlog.testing.capture_logs() as logs:
            for api in APIS.values():
                for _ in range(2):
                    answer = await asked.post(api.path, {**api.body, name: 1, "stream": streamed})
                    assert answer.status_code == 200, answer.text
                    assert answer.headers[HEADER] == name
            assert HEADER not in (await asked.post(api.path, api.body)).headers
    said = [(line["api"], line["fields"]) for line in logs if line["event"] == "fields_passed_over"]
    assert said == [(api.path, [name]) for api in APIS.values()]


TOOLS_BY_API: Mapping[str, Any] = {
    "chat": {"type": "function", "function": {"name": "add"}},
    "responses": {"type": "function", "name": "add", "parameters": {}},
    "messages": {"name": "add", "input_schema": {"type": "object"}},
}


@pytest.mark.parametrize("limits", [None, "parts tools", "parts tool_place"])
async def test_tools_that_the_model_is_not_shown_are_said(
    redis: RedisClient, redis_url: str, limits: str | None
) -> None:
    async with asking(redis, redis_url, card=CARD.model_copy(update={"template_limits": limits})) as asked:
        for name, tool in TOOLS_BY_API.items():
            api = APIS[name]
            answer = await asked.post(api.path, {**api.body, "tools": [tool]})
            assert answer.status_code == 200, answer.text
            assert answer.headers.get(HEADER) == ("tools" if limits == "parts tools" else None)
            assert HEADER not in (await asked.post(api.path, api.body)).headers


async def test_strict_fields_refuse_every_unknown_one(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url, strict_fields=True) as asked:
        for api in APIS.values():
            answer = await asked.post(api.path, {**api.body, "next_months_key": 1})
            assert answer.status_code == 400
            assert "unknown field next_months_key" in answer.text
            assert (await asked.post(api.path, api.body)).status_code == 200


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHOSEN = {"type": "function", "function": {"name": "add"}}
THOUGHT = {"type": "reasoning", "text": "hm"}
TURN = {"role": "user", "content": "hello"}


def answered(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns a chat in which the assistant has answered in those parts."""
    return {"messages": [TURN, {"role": "assistant", "content": list(parts), **fields}, TURN]}


@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ({"max_tokens": 4.0, "seed": 3.0, "top_k": -1.0}, {"max_tokens": 4, "seed": 3, "top_k": 0}),
        ({"stop": ""}, {"stop": ()}),
        ({"stop": ["", "a"]}, {"stop": ("a",)}),
        ({"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, {}),
        (
            {"tools": [TOOL], "tool_choice": CHOSEN, "response_format": SCHEMA},
            {"response_format": None},
        ),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": SCHEMA}, {"response_format": None}),
    ],
)
def test_what_chat_programs_send_is_read_as_they_mean_it(fields: dict[str, Any], made: dict[str, Any]) -> None:
    with reading_fields(is_strict=False):
        request = read_chat({**APIS["chat"].body, **fields}).request(CARD)
    assert {name: getattr(request, name) for name in made} == made


@pytest.mark.parametrize(
    ("fields", "content", "reasoning"),
    [
        (answered({"type": "text", "text": "5", "role": "assistant", "refusal": None}), "5", None),
        (answered({"type": "output_text", "text": "5", "annotations": []}), "5", None),
        (answered({"type": "refusal", "refusal": "no"}), "no", None),
        (answered(THOUGHT, {"type": "text", "text": "5"}, id="m", type="message"), "5", "hm"),
        (answered({"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "5"}), "5", "hm"),
    ],
)
def test_parts_of_an_answer_come_back_as_text_or_reasoning(
    fields: dict[str, Any], content: str, reasoning: str | None
) -> None:
    with reading_fields(is_strict=False):
        message = (read_chat({**APIS["chat"].body, **fields}).request(CARD).messages or ())[1]
    assert isinstance(message.content, tuple)
    assert ([part.text for part in message.content], message.reasoning) == ([content], reasoning)


def test_calls_from_before_there_were_tools_are_history() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1'}}
    result = {"role": "function", "name": "add", "content": "5"}
    request = read_chat({**APIS["chat"].body, "messages": [TURN, call, result]}).request(CARD)
    _, said, heard = request.messages or ()
    assert said.tool_calls is not None
    assert (said.tool_calls[0].function.name, said.tool_calls[0].function.arguments) == ("add", '{"a": 1')
    assert (heard.role, heard.name, heard.content) == ("tool", "add", "5")


FORMS_BESIDE_A_CALL: Mapping[str, dict[str, Any]] = {
    "response_format": {"tools": [TOOL], "tool_choice": "required", "response_format": SCHEMA},
    "text.format": {
        "tools": [TOOLS_BY_API["responses"]], "tool_choice": "required",
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
    },
    "output_config.format": {
        "tools": [TOOLS_BY_API["messages"]], "tool_choice": {"type": "any"},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    },
}  # fmt: skip


@pytest.mark.parametrize(("said", "api"), [*zip(FORMS_BESIDE_A_CALL, ("chat", "responses", "messages"), strict=True)])
async def test_a_form_of_the_text_beside_a_required_call_is_said(
    redis: RedisClient, redis_url: str, said: str, api: str
) -> None:
    async with asking(redis, redis_url) as asked:
        answer = await asked.post(APIS[api].path, {**APIS[api].body, **FORMS_BESIDE_A_CALL[said]})
        assert (answer.status_code, answer.headers.get(HEADER)) == (200, said), answer.text


async def test_a_thread_is_refused_as_clients_of_the_messages_api_expect(redis: RedisClient, redis_url: str) -> None:
    """From these details they fall back to sending the whole conversation."""
    async with asking(redis, redis_url) as asked:
        api = APIS["messages"]
        answer = await asked.post(api.path, {**api.body, "thread": {"type": "create"}})
        assert answer.status_code == 400
        details = answer.json()["error"]["details"]
        assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_a_slash_at_the_end_of_a_path_changes_nothing(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url) as asked:
        for api in APIS.values():
            assert (await asked.post(f"{api.path}/", api.body)).status_code == 200
        assert (await asked.http.get("/v1/models/")).json()["object"] == "list"


NAMED = {"name": "mcp__" + "x" * 123, "description": "d", "input_schema": {"type": "object"}}
RAN = [
    {"type": "server_tool_use", "id": "s", "name": "tool_search_tool_regex", "input": {"query": "x"}},
    {"type": "tool_search_tool_result", "tool_use_id": "s", "content": {"tool_references": []}},
    {"type": "thinking", "thinking": "hm", "signature": "of another server"},
    {"type": "text", "text": "so", "citations": [{"cited_text": "a"}], "cache_control": {"type": "ephemeral"}},
    {"type": "tool_use", "id": "c", "name": "find", "input": {}, "cache_control": {"type": "ephemeral"}},
]
FOUND = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "tool_name": "add"}]}


def test_messages_of_agents_are_read() -> None:
    tools = [{**NAMED, "defer_loading": True}, {"type": "tool_search_tool_regex_20251119", "name": "search"}]
    turns = [TURN, {"role": "assistant", "content": RAN}, {"role": "user", "content": [FOUND]}]
    with reading_fields(is_strict=False) as notes:
        request = read_message({**APIS["messages"].body, "tools": tools, "messages": turns}).request()
    assert [tool["function"]["name"] for tool in request.tools] == [NAMED["name"]]
    _, said, found = request.messages or ()
    assert (said.content, said.reasoning, found.content) == ("so", "hm", "add")
    assert set(notes.said.split(", ")) == {
        "messages.content.server_tool_use", "messages.content.tool_search_tool_result", "messages.content.citations",
        "messages.content.cache_control", "tools.defer_loading", "tools.tool_search_tool_regex_20251119",
    }  # fmt: skip

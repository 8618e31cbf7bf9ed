"""Messages: what the worker is asked, and what Anthropic's official client gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from penstock.gateway.anthropic.request import IGNORED, REFUSED, MessageBody
from penstock.gateway.anthropic.tools import ClientTool
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import PARAMETERS, ChunkEntry, ToolCallDelta
from tests.gateway.anthropic.anthropic_clients import HELLO, MESSAGES, TINY, Asked, all_kinds, asking, end
from tests.support.documented_fields import ignored_for, refused_for
from tests.support.packages import ROOT
from tests.support.programs.fakes import ScriptedReply
from tests.support.programs.gateway_client import events_of

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BRIEF: Any = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "!"}]
THINKING: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
WEATHER: Any = {
    "name": "weather",
    "description": "What it is like outside.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
async def asked(redis: RedisClient, redis_url: str) -> AsyncIterator[Asked]:
    async with asking(redis, redis_url) as asked:
        yield asked


@pytest.fixture
async def full(redis: RedisClient, redis_url: str) -> AsyncIterator[Asked]:
    async with asking(redis, redis_url, all_kinds) as asked:
        yield asked


async def test_a_body_is_what_the_types_say(asked: Asked) -> None:
    message = await asked.message()
    assert message.id == f"msg_{asked.request.id}"
    assert (message.model, message.role, message.stop_reason, message.stop_sequence) == (
        "tiny", "assistant", "end_turn", None,
    )  # fmt: skip
    (block,) = message.content
    assert (block.type, block.text) == ("text", "two words")  # type: ignore[union-attr]
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 4, 5)
    assert usage.output_tokens_details is not None
    assert usage.output_tokens_details.thinking_tokens == 2


async def test_events_are_what_the_types_say_and_come_in_order(full: Asked) -> None:
    response = await full.http.post(MESSAGES, json={**TINY, **THINKING, "stream": True})
    assert response.content.isascii()
    events = [json.loads(event.data) for event in events_of(response.text)]
    names = [line.removeprefix("event: ") for line in response.text.split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    assert names.pop(1) == "ping"
    events.pop(1)
    for event in events:
        EVENT.validate_json(json.dumps(event), strict=True)
    shown = [
        event["delta"]["type"] if "delta" in event and "index" in event else f"{event['type']} {event.get('index', '')}"
        for event in events
    ]
    assert shown == [
        "message_start ", "content_block_start 0", "thinking_delta", "thinking_delta", "signature_delta",
        "content_block_stop 0", "content_block_start 1", "text_delta", "text_delta", "content_block_stop 1",
        "content_block_start 2", "input_json_delta", "input_json_delta", "content_block_stop 2",
        "content_block_start 3", "input_json_delta", "content_block_stop 3", "message_delta ", "message_stop ",
    ]  # fmt: skip
    assert events[0]["message"]["usage"]["input_tokens"] == 0
    assert events[-2]["usage"]["input_tokens"] == 5


async def test_a_stream_says_what_a_whole_body_does(full: Asked) -> None:
    async with full.client.messages.stream(**TINY, **THINKING) as stream:
        streamed = await stream.get_final_message()
    whole = await full.message(**THINKING)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]

    def told(message: Any) -> Any:
        given = message.model_dump(exclude_none=True)
        ids = {"id": "ID", "signature": "ID"}
        return json.loads(json.dumps(given).replace(given["id"], ids["id"]))

    assert told(streamed) == told(whole)


async def test_the_streaming_helper_gives_text_while_it_comes(asked: Asked) -> None:
    async with asked.client.messages.stream(**TINY) as stream:
        assert [text async for text in stream.text_stream] == ["two ", "words"]


async def test_the_client_for_threads_asks_the_same(asked: Asked) -> None:
    def ask() -> list[str]:
        with anthropic.Anthropic(base_url=asked.url, api_key="none", max_retries=0) as client:
            whole: Any = client.messages.create(**TINY)
            with client.messages.stream(**TINY) as stream:
                return [whole.content[0].text, "".join(stream.text_stream)]

    assert await asyncio.to_thread(ask) == ["two words", "two words"]


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
async def test_thinking_is_shown_to_those_who_asked_for_it(full: Asked, thinking: Any) -> None:
    fields = {} if thinking is None else {"thinking": thinking}
    message = await full.message(**fields)
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    async with full.client.messages.stream(**TINY, **fields) as stream:
        streamed = await stream.get_final_message()
    assert [block.type for block in streamed.content] == ["text", "tool_use", "tool_use"]


@pytest.mark.parametrize(
    ("thinking", "is_on"),
    [(None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True), (THINKING["thinking"], True)],
)
async def test_templates_are_told_whether_to_think(asked: Asked, thinking: Any, is_on: bool) -> None:
    await asked.message(thinking=thinking, chat_template_kwargs={"style": "terse"})
    expected = {"enable_thinking": is_on, "thinking": is_on, "style": "terse"}
    assert asked.request.chat_template_kwargs == expected


async def test_every_option_reaches_the_worker(asked: Asked) -> None:
    schema = {"type": "object", "properties": {}}
    options: Any = {
        "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop_sequences": ["END", "["], "seed": 3,
        "priority": 5, "timeout_s": 60, "system": BRIEF,
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": schema}},
        "metadata": {"user_id": "u"}, "service_tier": "auto", "mcp_servers": [], "container": None,
    }  # fmt: skip
    await asked.message(**options)
    request = asked.request
    same = ("max_tokens", "temperature", "top_p", "top_k", "seed", "priority", "timeout_s")
    assert {name: getattr(request, name) for name in same} == {name: options[name] for name in same}
    assert (request.stop, request.reasoning_effort, request.tenant) == (("END", "["), "high", None)
    assert request.response_format is not None
    assert request.response_format.json_schema is not None
    assert request.response_format.json_schema.schema_ == schema
    assert asked.messages == [
        {"role": "system", "content": BRIEF},
        {"role": "user", "content": "hello"},
    ]


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}, True),
    ],
)
async def test_tools_are_functions(asked: Asked, choice: Any, expected: Any, is_parallel: bool) -> None:
    tool = {**WEATHER, "cache_control": {"type": "ephemeral"}, "strict": True, "type": "custom"}
    await asked.message(tools=[tool], tool_choice=choice)
    request = json.loads(asked.request.model_dump_json())
    function = {"name": "weather", "parameters": WEATHER["input_schema"], "strict": True}
    assert request["tools"] == [
        {"type": "function", "function": {**function, "description": WEATHER["description"]}},
    ]
    assert (request["tool_choice"], request["parallel_tool_calls"]) == (expected, is_parallel)


async def test_tools_over_two_turns(redis: RedisClient, redis_url: str) -> None:
    async def call_then_say(reply: ScriptedReply) -> None:
        if len(reply.request.messages or ()) == 1:
            await all_kinds(reply)
            return
        await reply.own()
        await reply.chunk("It rains.", tokens=[1, 2, 3, 4, 5])
        await end(reply, "stop")

    async with asking(redis, redis_url, call_then_say) as asked:
        first = await asked.client.messages.create(**TINY, **THINKING, tools=[WEATHER])
        assert first.stop_reason == "tool_use"
        calls = [block for block in first.content if block.type == "tool_use"]
        assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Oslo"}), ("noon", {})]
        results: Any = [
            {"type": "tool_result", "tool_use_id": "call_1", "content": "rain"},
            {
                "type": "tool_result",
                "tool_use_id": "call_2",
                "content": [{"type": "text", "text": "no"}],
                "is_error": True,
            },
            {"type": "text", "text": "So?"},
        ]
        turns: Any = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        second: Any = await asked.client.messages.create(**{**TINY, "messages": turns}, tools=[WEATHER])
        assert second.content[0].text == "It rains."
        spelled = [
            {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, name, arguments in ((1, "weather", '{"city": "Oslo"}'), (2, "noon", "{}"))
        ]
        assert asked.messages[1:] == [
            {"role": "assistant", "content": "\u2028é!", "reasoning": "so be it", "tool_calls": spelled},
            {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
            {"role": "tool", "content": "no", "tool_call_id": "call_2"},
            {"role": "user", "content": "So?"},
        ]
        assert not asked.request.continue_final_message


async def test_history_is_not_judged(asked: Asked) -> None:
    inputs: list[Any] = [{"city": "Oslo"}, None, '{"city": "Os', [1]]
    calls: Any = [
        {"type": "tool_use", "id": f"{number}", "name": "no name of ours", "input": value}
        for number, value in enumerate(inputs)
    ]
    silent: Any = {"role": "assistant", "content": None}
    results: Any = [{"type": "text", "text": "So?"}, {"type": "tool_result", "tool_use_id": "", "content": []}]
    turns = [*HELLO, silent, {"role": "user", "content": results}, {"role": "assistant", "content": calls}]
    response = await asked.http.post(MESSAGES, json={**TINY, "messages": turns})
    assert response.status_code == 200, response.text
    assert [message["role"] for message in asked.messages] == ["user", "tool", "assistant"]
    arguments = [call["function"]["arguments"] for call in asked.messages[-1]["tool_calls"]]
    assert arguments == ['{"city": "Oslo"}', "{}", '{"city": "Os', "[1]"]
    assert not asked.request.continue_final_message  # its calls wait for results


async def test_a_final_turn_of_the_assistant_goes_on(asked: Asked) -> None:
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": "The "},
        {
            "role": "assistant",
            "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "best"}],
        },
    ]
    await asked.message(messages=turns)
    assert asked.request.continue_final_message
    assert asked.messages == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "The best"},
    ]


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        ("stop", {"stop_string": "END"}, ("stop_sequence", "END")),
        ("stop", {"stop_token_id": 7}, ("end_turn", None)),
        ("length", {}, ("max_tokens", None)),
        ("tool_calls", {"stop_token_id": 7}, ("tool_use", None)),
    ],
)
async def test_why_an_answer_ended(
    redis: RedisClient, redis_url: str, reason: str, stop: Any, expected: tuple[str, str | None]
) -> None:
    async def nothing(reply: ScriptedReply) -> None:
        await reply.own()
        await end(reply, reason, num_tokens=0, **stop)

    async with asking(redis, redis_url, nothing) as asked:
        whole = await asked.message(stop_sequences=["END"])
        async with asked.client.messages.stream(**TINY) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert (message.stop_reason, message.stop_sequence) == expected
        assert message.content == []
        assert (message.usage.input_tokens, message.usage.output_tokens) == (5, 0)


async def test_a_call_that_broke_off_shows_what_there_is(redis: RedisClient, redis_url: str) -> None:
    async def cut(reply: ScriptedReply) -> None:
        await reply.own()
        call = ToolCallDelta(index=0, id="call_1", name="weather", arguments='{"city": "Oslo", "da')
        await reply.write(ChunkEntry(index=0, offset=0, text="", tokens=(1,), tool_calls=(call,)))
        await end(reply, "length", num_tokens=1)

    async with asking(redis, redis_url, cut) as asked:
        message = await asked.message()
        assert message.stop_reason == "max_tokens"
        assert message.content[0].input == {"city": "Oslo"}  # type: ignore[union-attr]


async def test_a_stream_goes_on_behind_an_event(full: Asked) -> None:
    """The request is sent again with its Idempotency-Key, to another replica or the same."""
    body = {**TINY, **THINKING, "stream": True}
    headers = {"Idempotency-Key": "once"}
    whole = events_of((await full.http.post(MESSAGES, json=body, headers=headers)).text)
    for place in (0, 4, len(whole) - 2):
        after = {**headers, "Last-Event-ID": whole[place].id or ""}
        rest = events_of((await full.http.post(MESSAGES, json=body, headers=after)).text)
        assert rest == whole[place + 1 :]
    assert len(full.worker.taken) == 1


@pytest.mark.parametrize("version", [None, "2023-06-01", "1999-01-01"])
async def test_any_version_is_taken(asked: Asked, version: str | None) -> None:
    headers = {} if version is None else {"anthropic-version": version, "anthropic-beta": "a,b"}
    response = await asked.http.post(MESSAGES, json=TINY, headers=headers)
    assert response.status_code == 200
    assert response.headers["request-id"] == response.headers["x-request-id"]


async def test_tokens_are_counted_of_the_same_prompt(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    async def count(_: object, request: Any) -> int:
        counted.append(request)
        return 42

    monkeypatch.setattr("penstock.producer.AsyncClient.count_tokens", count)
    fields: Any = {"system": "Be brief.", "tools": [WEATHER], **THINKING}
    result = await asked.client.messages.count_tokens(model="tiny", messages=HELLO, **fields)
    assert result.input_tokens == 42
    await asked.message(**fields)
    (request,) = counted
    shown = {"messages", "tools", "chat_template_kwargs", "continue_final_message"}
    assert request.model_dump(include=shown) == asked.request.model_dump(include=shown)


DOCS = ROOT / "docs"


def test_the_docs_list_every_field() -> None:
    section = (DOCS / "gateway.md").read_text().partition("## Anthropic's API")[2]
    section += (DOCS / "gateway-fields.md").read_text().partition("## Messages")[2]
    for name in {*MessageBody.model_fields, *IGNORED, *REFUSED, *ClientTool.model_fields} - {"type"}:
        assert f"`{name}`" in section or name in PARAMETERS, name
    assert ignored_for("messages") == IGNORED
    assert refused_for("messages").keys() == REFUSED.keys()

"""Chat completions: what the worker is asked, and what the client gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry, EndEntry, TokenLogprob, ToolCallDelta, TopLogprob
from tests.gateway.openai.openai_clients import EPOCH_S, HELLO, Asked, asking, data_of, two_words
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_harness import CARD, announce, running_gateway

CHAT = "/v1/chat/completions"
TINY = {"model": "tiny", "messages": HELLO}


@pytest.fixture
async def asked(redis: RedisClient, redis_url: str) -> AsyncIterator[Asked]:
    async with asking(redis, redis_url) as asked:
        yield asked


def chunks_of(documents: list[dict[str, Any]]) -> list[ChatCompletionChunk]:
    return [ChatCompletionChunk.model_validate_json(json.dumps(document), strict=True) for document in documents]


def content_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


@pytest.mark.parametrize("model", ["default", "tiny"])
async def test_a_model_is_named_by_its_queue_or_by_itself(asked: Asked, model: str) -> None:
    completion = await asked.openai.chat.completions.create(model=model, messages=HELLO)
    assert completion.choices[0].message.content == "two words"
    assert completion.model == model


async def test_a_body_is_what_the_types_say(asked: Asked) -> None:
    completion = await asked.body(CHAT, {**TINY, "n": 2}, ChatCompletion)
    assert completion.id == f"chatcmpl-{asked.request.id}"
    assert completion.created == EPOCH_S
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert {choice.message.content for choice in completion.choices} == {"two words"}
    assert {choice.finish_reason for choice in completion.choices} == {"stop"}
    usage = completion.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.completion_tokens, usage.total_tokens) == (18, 18)
    assert usage.prompt_tokens_details.cached_tokens == 0


async def test_a_stream_is_what_the_types_say(asked: Asked) -> None:
    documents = await asked.events(CHAT, {**TINY, "n": 2})
    chunks = chunks_of(documents)
    assert [content_of(chunks, index) for index in range(2)] == ["two words", "two words"]
    for index in range(2):
        of_choice = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.role for choice in of_choice] == ["assistant", None, None]
        assert [choice.finish_reason for choice in of_choice] == [None, None, "stop"]
    assert {(chunk.id, chunk.created, chunk.model) for chunk in chunks} == {
        (f"chatcmpl-{asked.request.id}", EPOCH_S, "tiny")
    }
    assert "usage" not in documents[0]


async def test_usage_comes_in_a_chunk_of_its_own(asked: Asked) -> None:
    documents = await asked.events(CHAT, {**TINY, "stream_options": {"include_usage": True}})
    *chunks, last = chunks_of(documents)
    assert all("usage" in document for document in documents)
    assert {chunk.usage for chunk in chunks} == {None}
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 9


async def test_the_official_client_puts_a_stream_together(asked: Asked) -> None:
    async with asked.openai.chat.completions.stream(model="tiny", messages=HELLO) as stream:
        completion = await stream.get_final_completion()
    assert completion.choices[0].message.content == "two words"
    assert completion.choices[0].finish_reason == "stop"


async def test_the_client_for_threads_asks_the_same(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url) as asked:

        def ask() -> list[str]:
            with openai.OpenAI(base_url=f"{asked.url}/v1", api_key="none", max_retries=0) as client:
                whole = client.chat.completions.create(model="tiny", messages=HELLO)
                stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
                return [
                    whole.choices[0].message.content or "",
                    "".join(chunk.choices[0].delta.content or "" for chunk in stream),
                ]

        assert await asyncio.to_thread(ask) == ["two words", "two words"]


async def test_an_answer_may_be_as_long_as_the_model_can_make_it(asked: Asked) -> None:
    await asked.body(CHAT, TINY, ChatCompletion)
    assert asked.request.max_tokens == CARD.max_model_len


async def test_every_option_reaches_the_worker(asked: Asked) -> None:
    options = {
        "n": 2, "max_completion_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": "END",
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "logit_bias": {"5": -1}, "logprobs": True, "top_logprobs": 2,
        "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "stop_token_ids": [9],
        "allowed_token_ids": [1, 2], "bad_token_ids": [8], "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "prompt_logprobs": 1, "echo": True, "priority": 5, "timeout_s": 60,
        "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}, "parallel_tool_calls": False,
        "tools": [{"type": "function", "function": {"name": "weather"}}], "tool_choice": "auto",
        "response_format": {"type": "json_object"}, "add_generation_prompt": True, "continue_final_message": False,
    }  # fmt: skip
    await asked.body(CHAT, TINY | options, ChatCompletion)
    expected = {name: value for name, value in options.items() if name not in ("max_completion_tokens", "top_logprobs")}
    expected |= {"max_tokens": 7, "stop": ["END"], "logprobs": 2}
    got = json.loads(asked.request.model_dump_json())
    assert {name: got[name] for name in expected} == {
        **expected,
        "response_format": {"type": "json_object", "json_schema": None},
    }
    assert set(options) | set(TINY) >= {
        name for name in asked.request.model_fields_set if name not in ("id", "max_tokens")
    }


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"seed": -1}, "seed", 2**63 - 1),
        ({"top_k": -1}, "top_k", 0),
        ({"top_p": 0}, "top_p", 1e-6),
        ({"stop": "["}, "stop", ("[",)),
        ({"max_tokens": None, "temperature": None, "tools": None, "stop": None}, "temperature", None),
        ({"top_logprobs": 0, "logprobs": False}, "logprobs", None),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"structured_outputs": {"grammar": "start: 'a'"}}, "grammar", "start: 'a'"),
        ({"enable_thinking": False}, "chat_template_kwargs", {"enable_thinking": False, "thinking": False}),
        ({"thinking": True}, "chat_template_kwargs", {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, "chat_template_kwargs", {"enable_thinking": False, "thinking": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 100}, "chat_template_kwargs": {"thinking": False}},
            "chat_template_kwargs",
            {"enable_thinking": True, "thinking": False},
        ),
        ({"enable_thinking": None, "thinking": None}, "chat_template_kwargs", {}),
    ],
)
async def test_values_of_other_servers_are_understood(asked: Asked, given: Any, name: str, value: Any) -> None:
    await asked.body(CHAT, TINY | given, ChatCompletion)
    assert getattr(asked.request, name) == value


@pytest.mark.parametrize("name", ["guided_json", "structured_outputs"])
async def test_a_schema_by_another_name_is_the_form_of_the_answer(asked: Asked, name: str) -> None:
    schema = {"type": "object"}
    await asked.body(CHAT, TINY | {name: schema if name == "guided_json" else {"json": schema}}, ChatCompletion)
    form = asked.request.response_format
    assert form is not None
    assert form.json_schema is not None
    assert form.json_schema.schema_ == schema


async def test_fields_that_ask_for_nothing_are_ignored(asked: Asked) -> None:
    ignored = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "num_ctx": 4096, "verbosity": "low",
        "functions": [], "modalities": ["text"], "use_beam_search": False, "function_call": None, "nobody_knows": None,
    }  # fmt: skip
    completion = await asked.body(CHAT, TINY | ignored, ChatCompletion)
    assert completion.choices[0].message.content == "two words"


async def test_messages_are_taken_as_clients_keep_them(asked: Asked) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages: Any = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "user", "content": "hello", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "refusal": "no",
            "annotations": [],
            "audio": None,
            "function_call": None,
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"index": 0, **call, "caller": {}}],
            "provider_specific_fields": {"a": 1},
            "reasoning": "a",
            "reasoning_content": "a",
        },
        {"role": "tool", "content": "12", "tool_call_id": "call_1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}], "tool_calls": []},
    ]
    await asked.body(CHAT, {"model": "tiny", "messages": messages}, ChatCompletion)
    given = asked.request.messages
    assert given is not None
    assert [message.model_dump(exclude_none=True) for message in given] == [
        {"role": "developer", "content": ({"type": "text", "text": "Be brief."},)},
        {"role": "user", "content": "hello", "name": "ann"},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "tool_calls": (call,), "reasoning": "a"},
        {"role": "tool", "content": "12", "tool_call_id": "call_1"},
        {"role": "assistant", "content": ({"type": "text", "text": "never"},), "tool_calls": ()},
    ]


async def test_history_is_not_judged(asked: Asked) -> None:
    """The worker makes of it what the model's template needs."""
    calls = [
        {"id": "c" * 300, "type": "function", "function": {"name": "no name of ours", "arguments": arguments}}
        for arguments in ('{"city": "Os', "null", "[1]", "")
    ]
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": []},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": None, "tool_call_id": "nobody's"},
        {"role": "tool", "content": []},
    ]
    await asked.body(CHAT, {"model": "tiny", "messages": messages}, ChatCompletion)
    given = asked.request.messages
    assert given is not None
    assert [message.content for message in given[1:]] == [None, "", None, None, ""]
    assert given[3].model_dump()["tool_calls"] == tuple(calls)


def logprob(text: str, *others: str) -> TokenLogprob:
    data = [TopLogprob(id=ord(token[0]), token=token, bytes=token.encode(), logprob=-1.0) for token in others]
    return TokenLogprob(id=ord(text[0]), token=text, bytes=text.encode(), logprob=-0.5, top=tuple(data))


async def all_at_once(reply: ScriptedReply) -> None:
    """Answers with reasoning, text and two calls, with log-probabilities."""
    await reply.own()
    await reply.write(
        ChunkEntry(index=0, offset=0, text="", tokens=(1,), reasoning="so", prompt_logprobs=(None, logprob("h", "h")))
    )
    await reply.write(ChunkEntry(index=0, offset=1, text="\u2028é", tokens=(2,), logprobs=(logprob("é", "é", "e"),)))
    first = (ToolCallDelta(index=0, id="call_1", name="weather", arguments='{"city"'),)
    await reply.write(ChunkEntry(index=0, offset=2, text="", tokens=(3,), tool_calls=first))
    then = (
        ToolCallDelta(index=0, arguments=': "Oslo"}'),
        ToolCallDelta(index=1, id="call_2", name="noon", arguments="{}"),
    )
    await reply.write(ChunkEntry(index=0, offset=3, text="", tokens=(4, 5), tool_calls=then))
    await reply.write(EndEntry(finish_reason="tool_calls", prompt_tokens=2, completion_tokens=5, stop_token_id=7))


ALL = {**TINY, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1, "messages": HELLO}


@pytest.fixture
async def full(redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Asked]:
    async def tokenized(*_: object) -> tuple[int, ...]:
        return (104, 105)

    monkeypatch.setattr("penstock.gateway.openai.chat.prompt_tokens", tokenized)
    async with asking(redis, redis_url, all_at_once) as asked:
        yield asked


async def test_a_whole_body_shows_all_that_there_is(full: Asked) -> None:
    completion = await full.body(CHAT, ALL, ChatCompletion)
    (choice,) = completion.choices
    assert choice.message.content == "\u2028é"
    assert choice.message.tool_calls is not None
    assert [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [  # type: ignore[union-attr]
        ("call_1", "weather", '{"city": "Oslo"}'),
        ("call_2", "noon", "{}"),
    ]
    assert choice.finish_reason == "tool_calls"
    message, extra = choice.message.model_extra, choice.model_extra
    assert message == {"reasoning": "so", "reasoning_content": "so"}
    assert extra == {"stop_reason": 7, "token_ids": [1, 2, 3, 4, 5]}
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    (token,) = choice.logprobs.content
    assert (token.token, token.bytes, token.logprob) == ("é", list("é".encode()), -0.5)
    assert [top.token for top in token.top_logprobs] == ["é", "e"]
    scored = {"104": {"logprob": -1.0, "rank": 1, "decoded_token": "h"}}
    assert completion.model_extra == {"prompt_logprobs": [None, scored], "prompt_token_ids": [104, 105]}


async def test_a_stream_says_what_a_whole_body_does(full: Asked) -> None:
    documents = await full.events(CHAT, ALL)
    chunks = chunks_of(documents)
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    streamed = state.get_final_completion()
    whole = (await full.body(CHAT, ALL, ChatCompletion)).choices[0]
    (choice,) = streamed.choices
    assert choice.message.content == whole.message.content
    assert choice.logprobs == whole.logprobs
    assert choice.finish_reason == whole.finish_reason
    assert choice.message.tool_calls is not None
    assert whole.message.tool_calls is not None
    assert [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        (call.id, call.function.name, call.function.arguments)
        for call in whole.message.tool_calls
        if call.type == "function"
    ]
    assert (choice.message.model_extra or {})["reasoning"] == "so"
    assert documents[0]["prompt_token_ids"] == [104, 105]
    assert documents[0]["prompt_logprobs"][0] is None
    assert [token for document in documents for token in document["choices"][0].get("token_ids", ())] == [1, 2, 3, 4, 5]
    assert documents[-1]["choices"][0]["stop_reason"] == 7


async def test_an_event_is_one_line_of_ascii(full: Asked) -> None:
    response = await full.post(CHAT, {**ALL, "stream": True})
    assert response.content.isascii()
    assert response.text.splitlines() == [*response.text.rstrip("\n").split("\n"), ""]


async def test_reasoning_can_be_left_out(full: Asked) -> None:
    completion = await full.body(CHAT, TINY | {"include_reasoning": False}, ChatCompletion)
    assert not completion.choices[0].message.model_extra
    documents = await full.events(CHAT, TINY | {"include_reasoning": False})
    assert not any("reasoning" in document["choices"][0]["delta"] for document in documents)


async def test_tokens_are_named_by_their_ids_if_asked_for(full: Asked) -> None:
    completion = await full.body(CHAT, ALL | {"return_tokens_as_token_ids": True}, ChatCompletion)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].token == f"token_id:{ord('é')}"


async def nothing(reply: ScriptedReply) -> None:
    await reply.own()
    await reply.end("length")


async def test_an_answer_may_be_empty(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url, nothing) as asked:
        completion = await asked.body(CHAT, TINY, ChatCompletion)
        assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == ("", "length")
        (chunk,) = chunks_of(await asked.events(CHAT, TINY))
        assert (chunk.choices[0].delta.role, chunk.choices[0].finish_reason) == ("assistant", "length")


async def test_tokens_without_anything_to_read_make_no_event(redis: RedisClient, redis_url: str) -> None:
    async def quiet(reply: ScriptedReply) -> None:
        await reply.own()
        for text in ("", "one", "", ""):
            await reply.chunk(text, tokens=[1])
        await reply.end()

    async with asking(redis, redis_url, quiet) as asked:
        assert [chunk.choices[0].delta.content for chunk in chunks_of(await asked.events(CHAT, TINY))] == ["one", None]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_model_of_several_queues_has_to_be_named_by_one(
    redis: RedisClient, redis_url: str, streamed: bool
) -> None:
    await announce(redis, "other")
    async with asking(redis, redis_url) as asked, ScriptedWorker(redis_url, two_words, queue="other"):
        with pytest.raises(openai.BadRequestError, match="default, other"):
            await asked.openai.chat.completions.create(model="tiny", messages=HELLO, stream=streamed)
        completion = await asked.openai.chat.completions.create(model="other", messages=HELLO)
        assert completion.choices[0].message.content == "two words"


async def test_events_are_those_of_any_other_replica(redis: RedisClient, redis_url: str) -> None:
    """Only the id of the request differs."""
    async with asking(redis, redis_url) as asked, running_gateway(redis_url) as replica:
        streams = []
        for url in (asked.url, replica.url):
            response = await asked.http.post(f"{url}{CHAT}", json={**TINY, "stream": True})
            streams.append(data_of(response.text))
        ids = [request.id or "" for request in asked.worker.taken]
        first, second = ([line.replace(id_, "ID") for line in stream] for id_, stream in zip(ids, streams, strict=True))
        assert first == second


@pytest.mark.parametrize("header", ["00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "nonsense", ""])
async def test_an_answer_is_part_of_the_clients_trace(asked: Asked, header: str) -> None:
    await asked.openai.chat.completions.create(model="tiny", messages=HELLO, extra_headers={"traceparent": header})
    assert asked.request.traceparent == (header if header.startswith("00-") else None)

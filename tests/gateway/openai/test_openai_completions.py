"""Completions: one prompt or several, whole and streamed, with log-probabilities in their old form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import reduce
from typing import Any

import openai
import pytest
from openai.types import Completion

from penstock.gateway.openai.legacy_logprobs import joined
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry, EndEntry, TokenLogprob, TopLogprob
from tests.gateway.openai.openai_clients import EPOCH_S, Asked, asking
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedReply

COMPLETIONS = "/v1/completions"
HELLO = {"model": "tiny", "prompt": "hello"}


@pytest.fixture
async def asked(redis: RedisClient, redis_url: str) -> AsyncIterator[Asked]:
    async with asking(redis, redis_url) as asked:
        yield asked


async def echo(reply: ScriptedReply) -> None:
    """Says the prompt, once per choice; tokens are characters."""
    reply.epoch = EPOCH_S * 1_000_000
    await reply.own()
    request = reply.request
    said = request.prompt if request.prompt is not None else "".join(map(chr, request.prompt_token_ids or ()))
    for index in range(request.n):
        await reply.chunk(f"{said}{index}", index=index)
    await reply.end("length")


async def test_a_body_is_what_the_types_say(asked: Asked) -> None:
    completion = await asked.body(COMPLETIONS, {**HELLO, "n": 2}, Completion)
    assert (completion.id, completion.created) == (f"cmpl-{asked.request.id}", EPOCH_S)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in completion.choices] == [
        (0, "two words", "stop"),
        (1, "two words", "stop"),
    ]
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (5, 18)


async def test_a_stream_says_what_a_whole_body_does(asked: Asked) -> None:
    documents = await asked.events(COMPLETIONS, {**HELLO, "stream_options": {"include_usage": True}})
    *chunks, last = documents
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
        ("two ", None),
        ("words", None),
        ("", "stop"),
    ]
    Completion.model_validate_json(json.dumps(chunks[-1]), strict=True)
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 14)


async def test_the_official_client_reads_both(asked: Asked) -> None:
    whole = await asked.openai.completions.create(model="tiny", prompt="hello")
    stream = await asked.openai.completions.create(model="tiny", prompt="hello", stream=True)
    assert whole.choices[0].text == "".join([chunk.choices[0].text async for chunk in stream]) == "two words"


async def test_max_tokens_is_openais_where_it_is_left_out(asked: Asked) -> None:
    await asked.body(COMPLETIONS, HELLO, Completion)
    assert asked.request.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["a", "b", ""], ["a0", "a1", "b0", "b1", "0", "1"]),
        ([104, 105], ["hi0", "hi1"]),
        ([[104], [105]], ["h0", "h1", "i0", "i1"]),
        ([""], ["0", "1"]),
    ],
)
async def test_choices_follow_the_order_of_the_prompts(
    redis: RedisClient, redis_url: str, prompt: Any, texts: list[str]
) -> None:
    async with asking(redis, redis_url, echo) as asked:
        completion = await asked.body(COMPLETIONS, {"model": "tiny", "prompt": prompt, "n": 2}, Completion)
        assert [choice.text for choice in completion.choices] == texts
        assert [choice.index for choice in completion.choices] == list(range(len(texts)))
        assert completion.usage is not None
        assert completion.usage.completion_tokens == len("".join(texts))


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": []}, {"prompt": [[]]}, {"prompt": ["a", 1]}, {"prompt": [True]}, {"prompt": 5}, {"prompt": {}},
        {"prompt": [["a"]]}, {"prompt": None}, {"prompt": ["a", "b"], "stream": True},
        {"n": 2, "stream": True, "echo": True, "logprobs": 1}, {"best_of": 3}, {"suffix": "end"}, {"logprobs": True},
        {"prompt": ["a"] * 4}, {"messages": [{"role": "user", "content": "hi"}]}, {"max_tokens": 0},
    ],
)  # fmt: skip
async def test_what_cannot_be_had_is_refused(redis: RedisClient, redis_url: str, given: dict[str, Any]) -> None:
    async with asking(redis, redis_url, max_prompts=3) as asked:
        response = await asked.post(COMPLETIONS, {**HELLO, **given})
        error = response.json()["error"]
        assert response.status_code == 400, error
        assert error["param"] in given or error["param"] == "n"
        assert asked.worker.taken == []


async def test_an_error_of_one_prompt_ends_all(redis: RedisClient, redis_url: str) -> None:
    async def some(reply: ScriptedReply) -> None:
        await reply.own()
        if reply.request.prompt == "bad":
            await reply.end("error", code="too_long", message="the prompt has 9 tokens")
            return
        await reply.cancelled()
        await reply.end("cancelled")

    async with asking(redis, redis_url, some) as asked:
        with pytest.raises(openai.BadRequestError, match="9 tokens") as caught:
            await asked.openai.completions.create(model="tiny", prompt=["good", "bad"])
        assert caught.value.code == "context_length_exceeded"
        good = next(request for request in asked.worker.taken if request.prompt == "good")
        await eventually(lambda: redis.exists(keys.cancel("default", good.id or "")))


def logprob(data: bytes, logprob: float = -0.5) -> TokenLogprob:
    other = TopLogprob(id=1, token="x", bytes=b"x", logprob=-3.0)
    named = {"token": data.decode(errors="replace"), "bytes": data, "logprob": logprob}
    return TokenLogprob(id=data[0], top=(TopLogprob(id=data[0], **named), other), **named)


async def scored(reply: ScriptedReply) -> None:
    """Answers `日!`, whose first character is two tokens; the prompt `hi` is echoed and scored."""
    echoed, prompt = ("hi", (None, logprob(b"i"))) if reply.request.echo else ("", None)
    await reply.own()
    parts = (logprob(b"\xe6\x97"), logprob(b"\xa5"))
    await reply.write(
        ChunkEntry(index=0, offset=0, text=f"{echoed}日", tokens=(1, 2), logprobs=parts, prompt_logprobs=prompt)
    )
    await reply.write(ChunkEntry(index=0, offset=2, text="!", tokens=(3,), logprobs=(logprob(b"!", -9999.0),)))
    await reply.write(EndEntry(finish_reason="stop", prompt_tokens=2, completion_tokens=3))


SCORED = {"model": "tiny", "prompt": "hi", "logprobs": 2}


async def test_log_probabilities_have_their_old_form(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url, scored) as asked:
        completion = await asked.body(COMPLETIONS, SCORED, Completion)
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == [r"bytes:\xe6\x97", r"bytes:\xa5", "!"]
        assert logprobs.text_offset == [0, 0, 1]
        assert logprobs.token_logprobs == [-0.5, -0.5, -9999.0]
        assert logprobs.top_logprobs is not None
        assert logprobs.top_logprobs[2] == {"!": -9999.0, "x": -3.0}


async def test_an_echoed_prompt_is_scored_too(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url, scored) as asked:
        completion = (await asked.post(COMPLETIONS, SCORED | {"echo": True})).json()["choices"][0]
        assert asked.request.prompt_logprobs == 2
        assert completion["text"] == "hi日!"
        assert completion["logprobs"] == {
            "tokens": ["h", "i", r"bytes:\xe6\x97", r"bytes:\xa5", "!"],
            "token_logprobs": [None, -0.5, -0.5, -0.5, -9999.0],
            "top_logprobs": [None, *completion["logprobs"]["top_logprobs"][1:]],
            "text_offset": [0, 1, 2, 2, 3],
        }
        streamed = await asked.events(COMPLETIONS, SCORED | {"echo": True})
        parts = [event["choices"][0]["logprobs"] for event in streamed[:-1]]
        assert reduce(joined, parts) == completion["logprobs"]
        assert "prompt_logprobs" not in completion


async def test_tokens_of_prompt_and_answer_are_shown_if_asked_for(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url, echo) as asked:
        body = {"model": "tiny", "prompt": [104, 105], "return_token_ids": True}
        completion = await asked.body(COMPLETIONS, body, Completion)
        extra = completion.choices[0].model_extra or {}
        assert (extra["token_ids"], extra["prompt_token_ids"]) == ([104, 105, 48], [104, 105])
        (first, _) = await asked.events(COMPLETIONS, body)
        assert (first["prompt_token_ids"], first["choices"][0]["token_ids"]) == ([104, 105], [104, 105, 48])

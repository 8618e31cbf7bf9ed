"""Chat completions, with the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from fakes import ScriptedReply, ScriptedWorker
from gateway_harness import announce, running_gateway

from penstock.producer.redis.connection import RedisClient

MESSAGES = [{"role": "user", "content": "hello"}]


async def two_words(reply: ScriptedReply) -> None:
    await reply.own()
    await reply.chunk("two ")
    await reply.chunk("words")
    await reply.end("stop")


@pytest.fixture
async def client(redis: RedisClient, redis_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    await announce(redis)
    async with (
        ScriptedWorker(redis_url, two_words),
        running_gateway(redis_url) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("model", ["default", "tiny"])
async def test_a_model_is_named_by_its_queue_or_by_itself(client: openai.AsyncOpenAI, model: str) -> None:
    completion = await client.chat.completions.create(model=model, messages=MESSAGES)  # type: ignore[arg-type]
    assert completion.choices[0].message.content == "two words"


async def test_a_completion_is_streamed(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
    assert "".join([chunk.choices[0].delta.content async for chunk in stream]) == "two words"


async def test_an_unknown_model_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'huge' does not exist"):
        await client.chat.completions.create(model="huge", messages=MESSAGES)  # type: ignore[arg-type]

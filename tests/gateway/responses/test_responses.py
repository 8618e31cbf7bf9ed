"""Responses with the official client, against a worker that does as it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from fakes import ScriptedReply, ScriptedWorker
from gateway_harness import Running, announce, running_gateway
from openai.types.responses import Response

from penstock.producer.redis.connection import RedisClient
from penstock.producer.wire import ChunkEntry, ToolCallDelta


async def answer(reply: ScriptedReply) -> None:
    """Does what the final message says."""
    messages = reply.request.messages or ()
    content = messages[-1].content
    what = content if isinstance(content, str) else "say parts"
    await reply.own()
    await _BEHAVIOURS[what.partition(" ")[0]](reply, what.partition(" ")[2])


async def _say(reply: ScriptedReply, text: str) -> None:
    for number, word in enumerate(text.split(" ")):
        await reply.chunk(f" {word}" if number else word)
    await reply.end("stop")


async def _think(reply: ScriptedReply, text: str) -> None:
    await _write(reply, reasoning="hm, ", num_tokens=3)
    await _write(reply, reasoning="yes", num_tokens=2)
    await reply.chunk(text)
    await reply.end("stop")


async def _call(reply: ScriptedReply, name: str) -> None:
    await reply.chunk("calling")
    await _write(reply, calls=(ToolCallDelta(index=0, id="call_1", name=name, arguments='{"city"'),))
    await _write(reply, calls=(ToolCallDelta(index=0, arguments=': "Oslo"}'),))
    await _write(reply, calls=(ToolCallDelta(index=1, id="call_2", name=name, arguments="{}"),))
    await reply.end("tool_calls")


async def _cut(reply: ScriptedReply, text: str) -> None:
    await reply.chunk(text)
    await reply.end("length")


async def _wait(reply: ScriptedReply, text: str) -> None:
    await reply.chunk(text)
    await reply.cancelled()
    await reply.end("cancelled")


async def _break(reply: ScriptedReply, text: str) -> None:
    await reply.chunk(text)
    await reply.end("error", code="engine_error", message="the engine broke")


async def _refuse(reply: ScriptedReply, text: str) -> None:
    await reply.end("error", code="too_long", message=text)


async def _expire(reply: ScriptedReply, text: str) -> None:
    await reply.end("expired")


_BEHAVIOURS = {
    "say": _say, "think": _think, "call": _call, "cut": _cut, "wait": _wait, "break": _break, "refuse": _refuse,
    "expire": _expire,
}  # fmt: skip


async def _write(
    reply: ScriptedReply, *, reasoning: str = "", calls: tuple[ToolCallDelta, ...] = (), num_tokens: int = 1
) -> None:
    offset = reply.tokens.get(0, 0)
    reply.tokens[0] = offset + num_tokens
    tokens = tuple(range(num_tokens))
    await reply.write(ChunkEntry(index=0, offset=offset, text="", tokens=tokens, reasoning=reasoning, tool_calls=calls))


@pytest.fixture
async def worker(redis: RedisClient, redis_url: str) -> AsyncIterator[ScriptedWorker]:
    await announce(redis)
    async with ScriptedWorker(redis_url, answer) as worker:
        yield worker


@pytest.fixture
async def gateway(worker: ScriptedWorker, redis_url: str) -> AsyncIterator[Running]:
    async with running_gateway(redis_url) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def strictly(response: Response) -> Response:
    """As the client's own types have it, to the letter."""
    return Response.model_validate(response.model_dump(by_alias=True, warnings="error"), strict=True)


async def test_an_answer(client: openai.AsyncOpenAI) -> None:
    response = strictly(await client.responses.create(model="tiny", input="say two words"))
    assert (response.status, response.output_text) == ("completed", "two words")
    assert response.usage is not None
    assert response.usage.output_tokens == 9
    assert response.completed_at is not None
    assert response.completed_at >= response.created_at

"""Anthropic's official client, and a worker that thinks, says and calls what a test wants."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx2

from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry, EndEntry, GenerateRequest, ToolCallDelta
from tests.support.patience import WAIT_S
from tests.support.programs.fakes import Behaviour, ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_harness import announce, running_gateway

HELLO: Any = [{"role": "user", "content": "hello"}]
TINY: Any = {"model": "tiny", "max_tokens": 50, "messages": HELLO}
MESSAGES = "/v1/messages"


async def two_words(reply: ScriptedReply) -> None:
    await reply.own()
    await reply.chunk("two ", tokens=[1, 2])
    await reply.chunk("words", tokens=[3, 4, 5])
    await end(reply, "stop", stop_token_id=7)


async def all_kinds(reply: ScriptedReply) -> None:
    """Answers with reasoning, text and two calls."""
    await reply.own()
    await reply.write(ChunkEntry(index=0, offset=0, text="", tokens=(1,), reasoning="so "))
    await reply.write(ChunkEntry(index=0, offset=1, text="\u2028é", tokens=(2,), reasoning="be it"))
    first = (ToolCallDelta(index=0, id="call_1", name="weather", arguments='{"city"'),)
    await reply.write(ChunkEntry(index=0, offset=2, text="!", tokens=(3,), tool_calls=first))
    then = (
        ToolCallDelta(index=0, arguments=': "Oslo"}'),
        ToolCallDelta(index=1, id="call_2", name="noon", arguments="{}"),
    )
    await reply.write(ChunkEntry(index=0, offset=3, text="", tokens=(4, 5), tool_calls=then))
    await end(reply, "tool_calls")


async def end(reply: ScriptedReply, reason: str, *, num_tokens: int = 5, **fields: Any) -> None:
    """Ends a reply to a prompt of nine tokens, four of them cached."""
    counts = {"prompt_tokens": 9, "cached_tokens": 4, "completion_tokens": num_tokens, "reasoning_tokens": 2}
    await reply.write(EndEntry.model_validate({"finish_reason": reason, **counts, **fields}))


@dataclass(frozen=True, slots=True)
class Asked:
    """A client, its gateway, and the requests that came to the worker."""

    client: anthropic.AsyncAnthropic
    http: httpx2.AsyncClient
    url: str
    worker: ScriptedWorker

    @property
    def request(self) -> GenerateRequest:
        """Last request."""
        return self.worker.taken[-1]

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(message.model_dump_json(exclude_none=True)) for message in self.request.messages or ()]

    async def message(self, **fields: Any) -> anthropic.types.Message:
        """Returns the answer, which must match that type exactly."""
        response = await self.http.post(MESSAGES, json=TINY | fields)
        assert response.status_code == 200, response.text
        return anthropic.types.Message.model_validate_json(response.text, strict=True)

    async def refusal(self, **fields: Any) -> dict[str, Any]:
        """Returns the error of a request that is refused with 400."""
        response = await self.http.post(MESSAGES, json=TINY | fields)
        assert response.status_code == 400, response.text
        error: dict[str, Any] = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        return error


@asynccontextmanager
async def asking(
    redis: RedisClient, redis_url: str, behave: Behaviour = two_words, **settings: Any
) -> AsyncIterator[Asked]:
    await announce(redis)
    async with (
        ScriptedWorker(redis_url, behave) as worker,
        running_gateway(redis_url, **settings) as gateway,
        anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client,
        httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        yield Asked(client, http, gateway.url, worker)

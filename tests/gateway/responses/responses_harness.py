"""A worker that does as the final message says, and clients of gateways in front of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry, ToolCallDelta
from tests.support.programs import gateway_client
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_harness import announce

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
EPOCH_S = 1_795_298_400


async def answer(reply: ScriptedReply) -> None:
    """Answers `say two words`, `think hello`, `call weather`, ...: a behaviour, and what it is about."""
    content = (reply.request.messages or ())[-1].content
    assert isinstance(content, str)
    what, _, about = content.partition(" ")
    reply.epoch = EPOCH_S * 1_000_000
    await reply.own()
    await _BEHAVIOURS.get(what, _say)(reply, about)


async def _say(reply: ScriptedReply, text: str) -> None:
    for number, word in enumerate(text.split(" ")):
        await reply.chunk(f" {word}" if number else word)
    await reply.end("stop")


async def _think(reply: ScriptedReply, text: str) -> None:
    await write(reply, reasoning="hm, ", num_tokens=3)
    await write(reply, reasoning="yes", num_tokens=2)
    await reply.chunk(text)
    await reply.end("stop", reasoning_tokens=5)


async def _call(reply: ScriptedReply, name: str) -> None:
    await reply.chunk("calling")
    await write(reply, calls=(ToolCallDelta(index=0, id="call_1", name=name, arguments='{"city"'),))
    await write(reply, calls=(ToolCallDelta(index=0, arguments=': "Oslo"}'),))
    await write(reply, calls=(ToolCallDelta(index=1, id="call_2", name=name, arguments="{}"),))
    await reply.end("tool_calls")


async def _cut_call(reply: ScriptedReply, name: str) -> None:
    await write(reply, calls=(ToolCallDelta(index=0, id="call_1", name=name, arguments='{"ci'),))
    await reply.end("length")


async def _cut(reply: ScriptedReply, text: str) -> None:
    await reply.chunk(text)
    await reply.end("length")


async def _wait(reply: ScriptedReply, text: str) -> None:
    """Waits until the request is cancelled."""
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
    "say": _say, "think": _think, "call": _call, "cut_call": _cut_call, "cut": _cut, "wait": _wait, "break": _break,
    "refuse": _refuse, "expire": _expire,
}  # fmt: skip


async def write(
    reply: ScriptedReply,
    *,
    text: str = "",
    reasoning: str = "",
    calls: tuple[ToolCallDelta, ...] = (),
    num_tokens: int = 1,
    **more: Any,
) -> None:
    """Writes a chunk with more than text."""
    offset = reply.tokens.get(0, 0)
    reply.tokens[0] = offset + num_tokens
    tokens = tuple(range(num_tokens))
    entry = ChunkEntry(index=0, offset=offset, text=text, tokens=tokens, reasoning=reasoning, tool_calls=calls, **more)
    await reply.write(entry)


class Asked(gateway_client.Asked):
    """Adds calls for responses."""

    async def create(self, said: str, **options: Any) -> Response:
        """Creates a response, which must match its type exactly."""
        return strictly(await self.openai.responses.create(model="tiny", input=said, **options))

    async def post(self, said: Any, headers: Mapping[str, str] | None = None, **options: Any) -> httpx2.Response:
        body = {"model": "tiny", "input": said, **options}
        return await self.http.post("/v1/responses", json=body, headers=headers)

    async def stream_of(self, response_id: str, **query: Any) -> str:
        """Returns all of its events as they came, or those after `starting_after`."""
        answer = await self.http.get(f"/v1/responses/{response_id}", params={"stream": "true", **query})
        assert answer.status_code == 200, answer.text
        return answer.text


def strictly(response: Response) -> Response:
    return Response.model_validate_json(response.model_dump_json(by_alias=True, exclude_unset=True), strict=True)


def events_of(text: str) -> list[Any]:
    """Returns the events of a stream. Each must match its type exactly, and have the type as its name."""
    events = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if lines:
            event = EVENT.validate_json(lines["data"], strict=True)
            assert lines["event"] == event.type == json.loads(lines["data"])["type"]
            events.append(event)
    return events


@asynccontextmanager
async def asking(redis: RedisClient, redis_url: str, **settings: Any) -> AsyncIterator[Asked]:
    await announce(redis)
    async with ScriptedWorker(redis_url, answer) as worker, Asked.beside(worker, redis, redis_url, **settings) as asked:
        yield asked

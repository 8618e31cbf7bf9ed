"""What an HTTP client is told of the arithmetic that wrote its answer, and of an answer that several wrote."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.redis.connection import RedisClient
from tests.gateway.openai.openai_clients import asking
from tests.support.programs.fakes import ScriptedReply

HELLO = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hello"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": {"model": "tiny", "input": "hello"},
    "/v1/messages": {**CHAT, "max_tokens": 10},
}


async def alone(reply: ScriptedReply) -> None:
    reply.arithmetic = "a1"
    await reply.own()
    await reply.chunk("two words")
    await reply.end("stop")


async def one_after_the_other(reply: ScriptedReply) -> None:
    reply.arithmetic = "a1"
    await reply.own()
    await reply.chunk("two ")
    reply.epoch, reply.arithmetic, reply.exact = reply.epoch + 1, "b2", 0
    await reply.own()
    await reply.chunk("words")
    await reply.end("stop")


@pytest.mark.parametrize("path", BODIES)
async def test_a_header_tells_of_a_whole_answer(redis: RedisClient, redis_url: str, path: str) -> None:
    for behave, said in ((alone, None), (one_after_the_other, "0")):
        async with asking(redis, redis_url, behave) as asked:
            answer = await asked.post(path, BODIES[path])
            assert (answer.status_code, answer.headers.get("x-penstock-exact")) == (200, said)
            if "completions" in path:
                assert answer.json()["system_fingerprint"] == ("fp_a1" if said is None else "fp_b2")


@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True}}], ids=["alone", "usage"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_last_event_tells_of_a_stream(
    redis: RedisClient, redis_url: str, path: str, usage: dict[str, Any]
) -> None:
    for behave, said in ((alone, None), (one_after_the_other, False)):
        async with asking(redis, redis_url, behave) as asked:
            events = await asked.events(path, {**BODIES[path], **usage})
            assert {event["system_fingerprint"] for event in events} == {"fp_a1"}
            assert [event.get("exact") for event in events if event["choices"] == [] or "exact" in event] == (
                [None] * len(usage) if said is None else [False] * (1 + len(usage))
            )
            assert events[-1].get("exact") is said


async def nobody_rounds_alike(reply: ScriptedReply) -> None:
    await reply.own()
    await reply.chunk("two ")
    await reply.end("error", code="arithmetic_gone", message="nobody is left")


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_that_must_be_exact_may_end_without_a_worker(
    redis: RedisClient, redis_url: str, path: str
) -> None:
    async with asking(redis, redis_url, nobody_rounds_alike) as asked:
        answer = await asked.post(path, {**BODIES[path], "exact": True})
        assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "false")
        assert "nobody is left" in answer.text
        assert asked.request.exact

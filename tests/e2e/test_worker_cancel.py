"""Cancelling and deadlines of requests that are queued, in prefill or in decode."""

from __future__ import annotations

import asyncio

import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text, expected_tokens
from tests.support.patience import eventually
from tests.support.programs.worker_harness import is_queue_empty, read_reply, read_until, running_worker, send


async def test_cancel_while_queued(redis_url: str, redis: RedisClient) -> None:
    await send(redis, prompt="x", id="x")
    await redis.set(keys.cancel("q", "x"), 1)
    engine = FakeEngine()
    async with running_worker(redis_url, engine):
        end = (await read_reply(redis, "x")).end
        await eventually(lambda: is_queue_empty(redis))
    assert (end.finish_reason, end.completion_tokens) == ("cancelled", 0)
    assert engine.prefilled == []
    assert not await redis.exists(keys.cancel("q", "x"))


async def test_cancel_while_prefilling(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine(prefill_steps=10**9, step_s=0.001)
    async with running_worker(redis_url, engine):
        await send(redis, prompt="x", id="x")
        await eventually(lambda: engine.prefilled)
        await redis.set(keys.cancel("q", "x"), 1)
        end = (await read_reply(redis, "x")).end
        await eventually(lambda: not engine.has_work())
    assert (end.finish_reason, end.completion_tokens, end.ttft_ms) == ("cancelled", 0, None)


async def test_cancel_while_decoding_keeps_what_was_written(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine(step_s=0.002)
    async with running_worker(redis_url, engine):
        await send(redis, prompt="x", id="x", max_tokens=10**6, n=2)
        beside = await send(redis, prompt="beside", max_tokens=100)
        await read_until(redis, "x", lambda entry: entry.type == "chunk")
        await redis.set(keys.cancel("q", "x"), 1)
        reply = await read_reply(redis, "x")
        assert (await read_reply(redis, beside)).text() == expected_text("beside", beside, 100)
    assert reply.end.finish_reasons == ("cancelled", "cancelled")
    for index in (0, 1):
        tokens = reply.tokens(index)
        assert tokens == expected_tokens(b"x", "x", index, len(tokens))
    assert reply.end.completion_tokens == len(reply.tokens(0)) + len(reply.tokens(1))


async def test_deadline_passes_while_queued(redis_url: str, redis: RedisClient) -> None:
    await send(redis, prompt="x", id="x", timeout_s=0.001)
    await asyncio.sleep(0.01)
    engine = FakeEngine()
    async with running_worker(redis_url, engine):
        assert (await read_reply(redis, "x")).end.finish_reason == "expired"
        await eventually(lambda: is_queue_empty(redis))
    assert engine.prefilled == []


@pytest.mark.parametrize("prefill_steps", [0, 10**9])
async def test_deadline_passes_while_running(redis_url: str, redis: RedisClient, prefill_steps: int) -> None:
    engine = FakeEngine(prefill_steps=prefill_steps, step_s=0.002)
    async with running_worker(redis_url, engine):
        await send(redis, prompt="x", id="x", timeout_s=0.2, max_tokens=10**6)
        reply = await read_reply(redis, "x")
        await eventually(lambda: not engine.has_work())
    assert reply.end.finish_reason == "expired"
    assert bool(reply.tokens()) == (not prefill_steps)
    assert reply.end.total_ms is not None
    assert 190 <= reply.end.total_ms < 5000

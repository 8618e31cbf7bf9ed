"""Owners of files and batches, and the effect of a key's limits on lines."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest

from penstock.protocol.redis.connection import RedisClient
from tests.gateway.batches.batches_harness import Asked, answer, jsonl, line
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedWorker
from tests.support.programs.gateway_harness import announce, new_key, revoke

LEASE_S = 0.6


async def two_callers(stack: AsyncExitStack, redis: RedisClient, redis_url: str, **limits: Any) -> tuple[Asked, Asked]:
    """Makes two callers with a key each; the first has the limits."""
    await announce(redis)
    worker = await stack.enter_async_context(ScriptedWorker(redis_url, answer))
    keys = [await new_key(redis_url, tenant="ours", **limits), await new_key(redis_url)]
    one, other = [
        await stack.enter_async_context(
            Asked.beside(worker, redis, redis_url, key.text, batch_lease_s=LEASE_S, isolate_prefix_cache=True)
        )
        for key in keys
    ]
    return one, other


async def test_no_key_sees_what_another_one_has(redis: RedisClient, redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        one, other = await two_callers(stack, redis, redis_url)
        batch = await one.ended(await one.create(jsonl([line("a")])))
        assert batch.output_file_id is not None
        for file_id in (batch.input_file_id, batch.output_file_id):
            for ask in (other.openai.files.retrieve, other.openai.files.content, other.openai.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await ask(file_id)
        for look in (other.openai.batches.retrieve, other.openai.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await look(batch.id)
        with pytest.raises(openai.NotFoundError):
            await other.openai.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        assert not (await other.openai.files.list()).data
        assert not (await other.openai.batches.list()).data
        assert len((await one.openai.files.list()).data) == 2
        (request,) = one.requests
        assert request.tenant == "ours"
        assert request.cache_salt


async def test_callers_without_a_key_are_one_tenant_alone_and_in_batches(redis: RedisClient, redis_url: str) -> None:
    await announce(redis)
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ScriptedWorker(redis_url, answer))
        asked = await stack.enter_async_context(Asked.beside(worker, redis, redis_url, isolate_prefix_cache=True))
        await asked.ended(await asked.create(jsonl([line("a")])))
        await asked.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
        in_batch, alone = asked.requests
        assert alone.cache_salt
        assert in_batch.cache_salt == alone.cache_salt


async def test_a_batch_of_models_that_its_key_may_not_use_fails(redis: RedisClient, redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        one, _ = await two_callers(stack, redis, redis_url, models=["another"])
        batch = await one.ended(await one.create(jsonl([line("a")])))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert [(each.line, each.code) for each in batch.errors.data or ()] == [(1, "model_not_found")]
        assert not one.requests


async def test_a_revoked_key_ends_its_batches(redis: RedisClient, redis_url: str) -> None:
    await announce(redis)
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ScriptedWorker(redis_url, answer))
        key, other = await new_key(redis_url), await new_key(redis_url)
        asked = await stack.enter_async_context(Asked.beside(worker, redis, redis_url, key.text, batch_lease_s=LEASE_S))
        await asked.create(jsonl([line("a", "wait here"), line("b", "wait here")]))
        await eventually(lambda: len(asked.requests) == 2)
        await revoke(redis_url, key)
        await eventually(lambda: _is_over(redis))
        progress = await _progress(redis)
        assert (progress["status"], progress["failed"]) == ("cancelled", "2")
        assert "was revoked" in progress["errors"]
        assert other.key_id != key.key_id


async def _progress(redis: RedisClient) -> dict[str, str]:
    (key,) = await redis.keys("penstock:gateway:{batch_*:progress")
    found: Any = await redis.hgetall(key)
    return {_text(name): _text(value) for name, value in found.items()}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


async def _is_over(redis: RedisClient) -> bool:
    return (await _progress(redis))["status"] == "cancelled"


async def test_lines_wait_for_the_tokens_that_their_key_may_use_in_a_minute(redis: RedisClient, redis_url: str) -> None:
    """Each line takes all there is, so the second one is not sent."""
    async with AsyncExitStack() as stack:
        one, _ = await two_callers(stack, redis, redis_url, limits={"tokens_per_minute": 100})
        lines = [line(name, "wait here", max_tokens=90) for name in ("a", "b")]
        batch = await one.create(jsonl(lines))
        await eventually(lambda: len(one.requests) == 1)
        await one.openai.batches.cancel(batch.id)
        batch = await one.ended(batch)
        assert len(one.requests) == 1
        assert batch.request_counts is not None
        assert batch.request_counts.failed == 2

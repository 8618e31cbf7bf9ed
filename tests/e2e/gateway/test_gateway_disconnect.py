"""When a client leaves, the engine frees what its request held."""

from __future__ import annotations

import asyncio

import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine
from tests.support.patience import eventually
from tests.support.programs.gateway_client import CHAT, bare_client, chat, read_events
from tests.support.programs.gateway_harness import running_gateway
from tests.support.programs.worker_harness import running_worker

ENDLESS = chat(max_tokens=90_000, stream=True) | {"model": "q"}


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "k"}])
async def test_the_engine_is_free_after_a_disconnect(
    redis: RedisClient, redis_url: str, headers: dict[str, str]
) -> None:
    engine = FakeEngine(max_num_seqs=1, step_s=0.005)
    async with (
        running_worker(redis_url, engine),
        running_gateway(redis_url, abandon_after_s=0.5) as gateway,
        bare_client(gateway) as client,
    ):
        async with client.stream("POST", CHAT, json=ENDLESS, headers=headers) as response:
            events = read_events(response)
            await anext(events)
            waiting = asyncio.create_task(client.post(CHAT, json=ENDLESS))
            await eventually(lambda: _num_queued(redis, 2))
            waiting.cancel()  # before its first token; the worker hears of it when it has a batch slot
            await eventually(lambda: redis.keys("penstock:q:*:cancel"))
            assert engine.stats().num_running == 1
        await eventually(lambda: engine.stats().num_running == 0)
        await eventually(lambda: _num_queued(redis, 0))


async def _num_queued(redis: RedisClient, count: int) -> bool:
    return await redis.xlen(keys.requests("q")) == count

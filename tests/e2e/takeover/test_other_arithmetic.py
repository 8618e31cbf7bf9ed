"""A reply that a worker of another arithmetic goes on with is finished, and says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.producer import AsyncClient
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import OwnEntry
from penstock.tools.chaos.fake_engine import expected_tokens
from penstock.worker.card import make_card
from penstock.worker.config import WorkerConfig
from tests.support.observed import INFO
from tests.support.programs.worker_harness import add_chunk, read_reply, running_worker, send, take_and_claim

HERE = replace(INFO, arithmetic="a" * 16)
"""The worker that goes on."""

PROMPT, NUM_TOKENS = "hi", 12


def named() -> str:
    return make_card("", WorkerConfig(), HERE, None, None).arithmetic or ""


async def half_write(redis: RedisClient, request_id: str, arithmetic: str) -> None:
    await send(redis, prompt=PROMPT, id=request_id, max_tokens=NUM_TOKENS, n=2, seed=5)
    await take_and_claim(redis, "dead", request_id, arithmetic=arithmetic)
    await add_chunk(redis, request_id, 1, 0, expected_tokens(PROMPT.encode(), 5, 0, 4))


@pytest.mark.parametrize("is_equal", [True, False])
async def test_the_reply_says_so(redis_url: str, redis: RedisClient, is_equal: bool) -> None:
    await half_write(redis, "begun", named() if is_equal else "another")
    async with running_worker(redis_url, name="here", info=HERE) as worker, AsyncClient(redis_url, queue="q") as client:
        reply = await read_reply(redis, "begun")
        whole = await client.handle("begun").result()
        resumed = worker.service.metrics.inexact._value.get()
    assert [entry.exact for entry in reply.entries if isinstance(entry, OwnEntry)] == [None, None if is_equal else 0]
    assert (whole.is_exact, whole.arithmetic, resumed) == (is_equal, named(), int(not is_equal))
    for index in range(2):
        assert reply.tokens(index) == expected_tokens(PROMPT.encode(), 5, index, NUM_TOKENS)

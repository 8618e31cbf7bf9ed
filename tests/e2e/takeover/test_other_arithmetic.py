"""A half-written reply goes on with the arithmetic that began it, for a while or for good; elsewhere it says so."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.stats import EngineInfo
from penstock.producer import AsyncClient, RequestFailed
from penstock.protocol import keys
from penstock.protocol.consumers import kind_of, set_aside_for
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import OwnEntry
from penstock.tools.chaos.fake_engine import FakeEngine, expected_tokens
from penstock.worker.card import make_card
from penstock.worker.config import WorkerConfig
from tests.support.observed import INFO
from tests.support.patience import eventually
from tests.support.programs.worker_harness import (
    Reply,
    add_chunk,
    is_queue_empty,
    read_reply,
    read_until,
    running_worker,
    send,
    take_and_claim,
)

HERE, FRIEND = (replace(INFO, arithmetic=digit * 16) for digit in "ab")
"""The worker that takes the reply first, and one of the arithmetic that began it."""

PROMPT, NUM_TOKENS = "hi", 12


def named(info: EngineInfo = HERE) -> str:
    return make_card("", WorkerConfig(), info, None, None).arithmetic or ""


async def half_write(redis: RedisClient, request_id: str, arithmetic: str, **more: Any) -> None:
    await send(redis, prompt=PROMPT, id=request_id, max_tokens=NUM_TOKENS, n=2, seed=5, **more)
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


FOREVER_MS = 4_000_000_000_000
KIND = kind_of("", named(FRIEND))
ASIDE = set_aside_for(KIND)


async def is_held(redis: RedisClient, consumer: str = ASIDE) -> bool:
    return bool(await redis.xpending_range(keys.requests("q"), keys.GROUP, "-", "+", 1, consumer))


def exacts(reply: Reply) -> list[int | None]:
    return [entry.exact for entry in reply.entries if isinstance(entry, OwnEntry)]


@pytest.mark.parametrize("exact", [True, False])
async def test_it_goes_on_with_its_own(redis_url: str, redis: RedisClient, exact: bool) -> None:
    """The first worker to take it leaves it to one of its arithmetic, which is full just now."""
    engine = FakeEngine(max_num_seqs=1)
    engine.hold()
    async with running_worker(redis_url, engine, name="friend", info=FRIEND, exact_wait_s=600) as friend:
        await send(redis, id="first", prompt="x", max_tokens=1)
        await eventually(lambda: bool(engine.prefilled))
        await half_write(redis, "begun", named(FRIEND), exact=exact)
        async with running_worker(redis_url, name="here", info=HERE, exact_wait_s=600) as here:
            await eventually(lambda: is_held(redis))
            await send(redis, id="untouched", prompt="x", max_tokens=1, exact=True)
            assert (await read_reply(redis, "untouched")).owners == ["here"]
            engine.allow()
            reply = await read_reply(redis, "begun")
        assert (here.engine.prefilled, friend.service.metrics.inexact._value.get()) == (["untouched"], 0)
    assert (reply.owners, exacts(reply)) == (["dead", "friend"], [None, None])
    for index in range(2):
        assert reply.tokens(index) == expected_tokens(PROMPT.encode(), 5, index, NUM_TOKENS)


async def test_after_a_while_it_goes_on_with_another(redis_url: str, redis: RedisClient) -> None:
    """One of its arithmetic is said to live and takes nothing. The wait begins when the heartbeat lapses."""
    await redis.zadd(keys.alike("q", KIND), {"friend": FOREVER_MS})
    await half_write(redis, "begun", named(FRIEND))
    async with running_worker(redis_url, name="here", info=HERE, exact_wait_s=0.3):
        await eventually(lambda: is_held(redis))
        reply = await read_reply(redis, "begun")
    assert (reply.owners, exacts(reply)) == (["dead", "here"], [None, 0])
    for index in range(2):
        assert reply.tokens(index) == expected_tokens(PROMPT.encode(), 5, index, NUM_TOKENS)


async def test_one_that_asks_for_exact_ends_where_nobody_comes(redis_url: str, redis: RedisClient) -> None:
    await redis.set(keys.heartbeat("q", ASIDE), "dead", px=10**6)
    await half_write(redis, "begun", named(FRIEND), exact=True)
    async with AsyncClient(redis_url, queue="q") as client:
        async with running_worker(redis_url, name="here", info=HERE, exact_wait_s=0, model_wait_s=77) as here:
            await eventually(lambda: is_held(redis))
            await redis.delete(keys.heartbeat("q", ASIDE))  # it lapses
            reply = await read_reply(redis, "begun")
            await eventually(lambda: is_queue_empty(redis))
            assert here.engine.prefilled == []
        with pytest.raises(RequestFailed, match="has been there for 77 s") as failed:
            await client.handle("begun").result()
    assert (failed.value.code, failed.value.reply.is_exact, len(reply.tokens(0))) == ("arithmetic_gone", True, 4)


async def test_a_new_process_of_that_name_leaves_it_too(redis_url: str, redis: RedisClient) -> None:
    """The entry is pending under its name, was another arithmetic's, and nobody noted that it lost its worker."""
    await redis.zadd(keys.alike("q", KIND), {"friend": FOREVER_MS})
    await half_write(redis, "begun", named(FRIEND))
    async with running_worker(redis_url, name="dead", info=HERE, exact_wait_s=600) as restarted:
        await eventually(lambda: is_held(redis))
        await redis.delete(keys.alike("q", KIND))
        assert restarted.engine.prefilled == []


async def test_a_hand_back_is_left_to_its_own_and_waits_for_none_where_there_is_none(
    redis_url: str, redis: RedisClient
) -> None:
    """A worker that drains is none of those that it waits for."""
    engine = FakeEngine()
    engine.hold()
    async with running_worker(redis_url, engine, name="friend", info=FRIEND, drain_timeout_s=0) as friend:
        await send(redis, prompt=PROMPT, id="begun", max_tokens=NUM_TOKENS, n=2, seed=5)
        engine.allow(3)
        await read_until(redis, "begun", lambda entry: entry.type == "chunk")
        async with running_worker(redis_url, name="here", info=HERE, exact_wait_s=600):
            await asyncio.gather(friend.drain(), reply := asyncio.ensure_future(read_reply(redis, "begun")))
    assert (reply.result().owners, exacts(reply.result())) == (["friend", "here"], [None, 0])

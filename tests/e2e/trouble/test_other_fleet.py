"""A worker with another model does not join a queue's fleet; if forced to, it leaves the fleet's replies alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.loading.identity import Identity
from penstock.producer import AsyncClient
from penstock.protocol import keys
from penstock.protocol.consumers import set_aside_for
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import OwnEntry
from penstock.tools.chaos.fake_engine import expected_text, expected_tokens, fake_model
from penstock.worker.config import WorkerConfig
from penstock.worker.errors import OtherFleet
from penstock.worker.service import WorkerService
from tests.support.patience import eventually
from tests.support.programs.worker_harness import (
    QUICK,
    add_chunk,
    is_queue_empty,
    read_reply,
    running_worker,
    send,
    take_and_claim,
)


def service(url: str, name: str, tokenizer: str, **config: bool) -> WorkerService:
    identity = Identity(revision=None, weights="w", tokenizer=tokenizer, template=None)
    model = replace(fake_model(), name=f"model of {name}", identity=identity)
    return WorkerService(WorkerConfig(**{**QUICK, "name": name, **config}), url, lambda _: model)


async def test_it_leaves_with_a_status_of_its_own_and_disturbs_nobody(redis_url: str, redis: RedisClient) -> None:
    there = Identity(revision=None, weights="w", tokenizer="t", template=None)
    async with running_worker(redis_url, name="there", identity=there), AsyncClient(redis_url, queue="q") as client:
        with pytest.raises(OtherFleet, match=r"have the tokenizer t \(so says there\), this one has other; ") as it:
            await service(redis_url, "new", "other").run()
        assert it.value.exit_status == 8
        reply = await client.generate("hi", max_tokens=5)
        assert reply.text == expected_text("hi", reply.request_id, 5)
        assert await redis.exists(keys.heartbeat("q", "new")) == 0
        card = await client.model_card()
        assert card is not None
        assert (card.worker, card.tokenizer) == ("there", "t")


async def test_once_the_others_have_left_it_has_the_queue(redis_url: str) -> None:
    async with running_worker(redis_url):
        pass
    worker = service(redis_url, "new", "other")
    async with AsyncClient(redis_url, queue="q") as client, _Run(worker):
        card = await client.model_card()
        assert card is not None
        assert (card.model, card.tokenizer) == ("model of new", "other")


async def test_one_that_is_told_to_joins(redis_url: str) -> None:
    worker = service(redis_url, "new", "other", allow_other_fleet=True)
    async with running_worker(redis_url, name="there"), AsyncClient(redis_url, queue="q") as client, _Run(worker):
        assert await client.count_tokens("x") == 1
        card = await client.model_card()
        assert card is not None
        assert card.worker == "there"


OLD, NEW = (Identity(revision=None, weights=weights, tokenizer="t", template=None) for weights in ("old", "new"))
PROMPT, NUM_TOKENS = "hi", 12


async def test_a_worker_with_other_weights_does_not_join(redis_url: str) -> None:
    async with running_worker(redis_url, identity=OLD), running_worker(redis_url, identity=NEW) as other:
        with pytest.raises(OtherFleet, match=r"have the weights old \(so says w\d+\), this one has new; "):
            await other.task


async def half_write(redis: RedisClient, request_id: str, *num_tokens: int) -> None:
    """Writes part of a reply as a worker with the old model that then dies."""
    await send(redis, prompt=PROMPT, id=request_id, max_tokens=NUM_TOKENS, n=2, seed=5)
    await take_and_claim(redis, "dead", request_id, digest=OLD.digest(None))
    for index, count in enumerate(num_tokens):
        tokens = expected_tokens(PROMPT.encode(), 5, index, count)
        await add_chunk(redis, request_id, 1 + index, 0, tokens, index=index)


async def holder(redis: RedisClient) -> str | None:
    found = await redis.xpending_range(keys.requests("q"), keys.GROUP, "-", "+", 1)
    return str(found[0]["consumer"]) if found else None


async def test_a_half_written_reply_goes_on_with_its_own_model(redis_url: str, redis: RedisClient) -> None:
    await half_write(redis, "begun", 5, 3)
    await half_write(redis, "untouched")
    aside = set_aside_for(OLD.digest(None))
    await redis.set(keys.heartbeat("q", aside), "dead", px=10**6)
    async with running_worker(redis_url, name="new", identity=NEW):
        await eventually(lambda: _is(holder(redis), aside))
        untouched = await read_reply(redis, "untouched")
        assert untouched.owners == ["dead", "new"]
        async with running_worker(redis_url, name="old", identity=OLD, allow_other_fleet=True):
            reply = await read_reply(redis, "begun")
    assert reply.owners == ["dead", "old"]
    assert [entry.digest for entry in reply.entries if isinstance(entry, OwnEntry)] == [OLD.digest(None)] * 2
    for index in range(2):
        assert reply.tokens(index) == expected_tokens(PROMPT.encode(), 5, index, NUM_TOKENS)
    await eventually(lambda: is_queue_empty(redis))


async def test_where_no_worker_has_its_model_any_more_it_ends(redis_url: str, redis: RedisClient) -> None:
    await half_write(redis, "begun", 5, 3)
    aside = set_aside_for(OLD.digest(None))
    await redis.set(keys.heartbeat("q", aside), "dead", px=10**6)
    async with running_worker(redis_url, name="new", identity=NEW, model_wait_s=77) as new:
        await eventually(lambda: _is(holder(redis), aside))
        await redis.delete(keys.heartbeat("q", aside))  # it lapses
        reply = await read_reply(redis, "begun")
        await eventually(lambda: is_queue_empty(redis))
        assert new.engine.prefilled == []
    assert reply.end.code == "model_gone"
    assert "none has been there for 77 s" in (reply.end.message or "")
    assert (len(reply.tokens(0)), len(reply.tokens(1))) == (5, 3)


async def test_how_long_it_is_waited_for(redis_url: str, redis: RedisClient) -> None:
    config: dict[str, Any] = {"heartbeat_ttl_s": 100.0, "model_wait_s": 800.0}
    async with running_worker(redis_url, name="old", identity=OLD, **config) as old:
        key = keys.heartbeat("q", set_aside_for(OLD.digest(None)))
        await eventually(lambda: redis.exists(key))
        assert await redis.hgetall(keys.digests("q")) == {"old": OLD.digest(None)}
        await old.drain()
        assert 100_000 < await redis.pttl(key) <= 900_000
    assert await redis.hgetall(keys.digests("q")) == {}


async def _is(found: Awaitable[object], expected: object) -> bool:
    return await found == expected


class _Run:
    """A running worker, drained at the end."""

    def __init__(self, worker: WorkerService) -> None:
        self._worker = worker

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._worker.run())
        await eventually(lambda: self._worker.readiness.is_ready or self._task.done())

    async def __aexit__(self, *error: object) -> None:
        self._worker.request_drain()
        await self._task

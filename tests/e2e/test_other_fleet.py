"""A worker that turns text into other tokens than those that serve a queue does not join them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from worker_harness import QUICK, eventually, running_worker

from penstock.engine.loading.identity import Identity
from penstock.producer import AsyncClient, keys
from penstock.producer.redis.connection import RedisClient
from penstock.worker.chaos.fake_engine import expected_text, fake_model
from penstock.worker.config import WorkerConfig
from penstock.worker.errors import OtherFleet
from penstock.worker.service import WorkerService


def service(url: str, name: str, tokenizer: str, **config: bool) -> WorkerService:
    identity = Identity(revision=None, weights="w", tokenizer=tokenizer, template=None)
    model = replace(fake_model(), name=f"model of {name}", identity=identity)
    return WorkerService(WorkerConfig(**{**QUICK, "name": name, **config}), url, lambda _: model)


async def test_it_leaves_with_a_status_of_its_own_and_disturbs_nobody(redis_url: str, redis: RedisClient) -> None:
    async with running_worker(redis_url, name="there"), AsyncClient(redis_url, queue="q") as client:
        with pytest.raises(
            OtherFleet, match=r"have the tokenizer \(none\) \(so says there\), this one has other; "
        ) as it:
            await service(redis_url, "new", "other").run()
        assert it.value.exit_status == 8
        reply = await client.generate("hi", max_tokens=5)
        assert reply.text == expected_text("hi", reply.request_id, 5)
        assert await redis.exists(keys.heartbeat("q", "new")) == 0
        card = await client.model_card()
        assert card is not None
        assert (card.worker, card.tokenizer) == ("there", None)


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


class _Run:
    """A worker at work, drained at the end."""

    def __init__(self, worker: WorkerService) -> None:
        self._worker = worker

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._worker.run())
        await eventually(lambda: self._worker.readiness.is_ready or self._task.done())

    async def __aexit__(self, *error: object) -> None:
        self._worker.request_drain()
        await self._task

"""A benchmark first checks that a worker serves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import cast

import pytest

from penstock.engine.loading.identity import Identity
from penstock.producer import AsyncClient, ConnectionLost, QueueStatus
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.bench import serving
from penstock.tools.bench.errors import NotServed, WrongModel
from penstock.tools.bench.serving import require_served, served_model, while_served
from tests.support.patience import WAIT_S
from tests.support.programs.worker_harness import running_worker

IDENTITY = Identity("r", "w" * 32, "t" * 32, None)


async def test_a_queue_is_served_or_not(redis_url: str) -> None:
    async with AsyncClient(redis_url, queue="q") as client, running_worker(redis_url, queue="other"):
        with pytest.raises(NotServed) as refused:
            await require_served(client, "q")
        await require_served(client.on("other"), "other")
    assert (refused.value.queue, refused.value.served) == ("q", ("other",))


async def test_a_model_is_known_by_its_name_and_its_digests(redis_url: str) -> None:
    worker = running_worker(redis_url, identity=IDENTITY, model_name="hub/fake")
    async with AsyncClient(redis_url, queue="q") as client, worker:
        card = await served_model(client, "q")
        assert card is not None
        for name in ("hub/fake", "fake", card.weights, card.digest):
            assert await served_model(client, "q", name) == card
        with pytest.raises(WrongModel, match="serve hub/fake, not llama"):
            await served_model(client, "q", "llama")


async def test_workers_that_do_not_name_their_model_are_not_taken_for_it(redis_url: str) -> None:
    async with AsyncClient(redis_url, queue="q") as client:
        assert await served_model(client, "q") is None
        with pytest.raises(WrongModel, match="a model that they do not name, not fake"):
            await served_model(client, "q", "fake")


async def test_work_ends_with_the_last_worker(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "LOOK_INTERVAL_S", 0.01)
    await redis.zadd(keys.serving("q"), {"w": 2e12})
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with AsyncClient(redis_url, queue="q") as client:
        task = asyncio.create_task(while_served(client, "q", work()))
        await asyncio.wait_for(begun.wait(), WAIT_S)
        await redis.delete(keys.serving("q"))
        with pytest.raises(NotServed, match="no worker serves queue 'q' any more"):
            await asyncio.wait_for(task, WAIT_S)
    assert ended.is_set()


async def test_a_server_that_is_away_for_a_moment_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LOOK_INTERVAL_S", 0.0)
    answers: Iterator[QueueStatus | ConnectionLost] = iter(
        [QueueStatus(True, 0), ConnectionLost("gone"), QueueStatus(True, 0), QueueStatus(False, 0)]
    )

    class Client:
        async def queue_status(self) -> QueueStatus:
            answer = next(answers)
            if isinstance(answer, ConnectionLost):
                raise answer
            return answer

        async def queues(self) -> tuple[str, ...]:
            return ()

    with pytest.raises(NotServed):
        await asyncio.wait_for(while_served(cast("AsyncClient", Client()), "q", asyncio.sleep(WAIT_S)), WAIT_S)
    assert next(answers, None) is None


async def test_the_outcome_of_work_is_its_own(redis_url: str, redis: RedisClient) -> None:
    await redis.zadd(keys.serving("q"), {"w": 2e12})

    async def divided(number: int) -> float:
        return 1 / number

    async with AsyncClient(redis_url, queue="q") as client:
        assert await while_served(client, "q", divided(2)) == 0.5
        with pytest.raises(ZeroDivisionError):
            await while_served(client, "q", divided(0))

"""Batch work is preempted by higher priorities in mid-generation, and loses nothing."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import Engine, EngineConfig
from penstock.engine.demo import MODEL_DIR
from penstock.producer import GenerateRequest
from penstock.protocol import keys
from penstock.protocol.queue.cancelling import cancel
from penstock.protocol.redis import pipeline
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine, expected_tokens
from penstock.worker.intake import handing_back
from penstock.worker.intake.handing_back import MAX_HANDBACKS
from penstock.worker.publish import publisher
from penstock.worker.watch import sweeping
from tests.e2e.real_engines import real_service, undisturbed
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import is_queue_empty, read_reply, read_until, running_worker, send, serving

SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_batch_tokens": 64, "num_pages": 520, "decode_steps": 1}
BATCH: dict[str, Any] = {
    "prompt": "The sun",
    "n": 2,
    "temperature": 1.2,
    "max_tokens": 40,
    "ignore_eos": True,
    "stop": ("qqq", "th"),
    "include_stop_str_in_output": True,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.2,
    "priority": -5,
}


async def begun(redis: RedisClient, *request_ids: str) -> None:
    for request_id in request_ids:
        await read_until(redis, request_id, lambda entry: entry.type == "chunk")


@pytest.mark.parametrize("holds_back", [False, True])
async def test_batch_work_gives_way_and_goes_on_where_it_was(
    redis_url: str, redis: RedisClient, holds_back: bool
) -> None:
    engine = FakeEngine(max_num_seqs=2, step_s=0.002, holds_back=holds_back)
    async with running_worker(redis_url, engine, name="w") as worker:
        for name in ("b0", "b1", "b2"):
            await send(redis, prompt=name, id=name, max_tokens=400, priority=-5, tenant="batch")
        await begun(redis, "b0", "b1")
        engine.hold()
        await send(redis, prompt="x", id="x", max_tokens=3)
        await eventually(lambda: "x" in engine.prefilled)
        engine.allow()
        assert (await read_reply(redis, "x")).end.finish_reason == "length"
        assert not await redis.exists(keys.state("q", "b2")) or engine.prefilled.index("b2") > 2
        replies = {name: await read_reply(redis, name) for name in ("b0", "b1", "b2")}
        assert worker.service.metrics.handed_back._value.get() == 1
        await eventually(lambda: is_queue_empty(redis))
    for name, reply in replies.items():
        assert reply.tokens() == expected_tokens(name.encode(), name, 0, 400)
    assert sorted(len(reply.owners) for reply in replies.values()) == [1, 1, 2]
    assert engine.prefilled[:3] == ["b0", "b1", "x"]
    assert engine.prefilled[3] in ("b0", "b1")  # it goes before the one that came after it
    assert not await redis.exists(keys.charged("q"), keys.bands("q"))


async def test_other_work_does_not_and_what_gave_way_often_does_not_either(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine(max_num_seqs=2, step_s=0.002)
    async with running_worker(redis_url, engine, name="w") as worker:
        await send(redis, prompt="usual", id="usual", max_tokens=300)
        await send(redis, prompt="often", id="often", max_tokens=4000, priority=-1)
        for number in range(MAX_HANDBACKS):
            await eventually(lambda: engine.prefilled.count("often") == number + 1)  # noqa: B023
            await begun(redis, "often")
            await send(redis, prompt="x", id=f"x{number}", max_tokens=1, priority=9)
            await read_reply(redis, f"x{number}")
        assert worker.service.metrics.handed_back._value.get() <= MAX_HANDBACKS
        reply = await read_reply(redis, "often")
        assert reply.tokens() == expected_tokens(b"often", "often", 0, 4000)
        assert (await read_reply(redis, "usual")).owners == ["w"]


async def test_a_cancel_is_not_lost_whenever_its_request_gives_way(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancel, each step of the way back to the lane, and sweeps, which look at cancels, come in any order."""
    chance, step = random.Random(46), pipeline.execute
    monkeypatch.setattr(sweeping, "SWEEP_INTERVAL_S", 0.005)

    async def later(*arguments: Any) -> Any:
        await asyncio.sleep(chance.choice([0, 0.01]))
        return await step(*arguments)

    for module in (publisher, handing_back):
        monkeypatch.setattr(module, "execute", later)
    engine = FakeEngine(max_num_seqs=1, step_s=0.001)
    async with running_worker(redis_url, engine, name="w", cancel_poll_ms=10_000) as worker:
        for number in range(20):
            name = f"b{number}"
            await send(redis, prompt=name, id=name, max_tokens=10**6, priority=-5)
            await begun(redis, name)
            acts = [
                send(redis, prompt="x", id=f"x{number}", max_tokens=30, timeout_s=1000),
                _after(chance.uniform(0, 0.04), cancel(redis, "q", name)),
            ]
            await asyncio.gather(*acts)
            assert (await read_reply(redis, name)).end.finish_reason == "cancelled"
            await read_reply(redis, f"x{number}")
        assert worker.service.metrics.handed_back._value.get() > 10


async def _after(seconds: float, work: Awaitable[None]) -> None:
    await asyncio.sleep(seconds)
    await work


async def test_a_model_goes_on_as_if_nothing_had_been(
    redis_url: str, redis: RedisClient, compile_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(**SIZES, compile_cache_dir=compile_cache)
    asked = [GenerateRequest.model_validate({**BATCH, "id": f"b{seed}", "seed": seed}) for seed in range(2)]
    expected = undisturbed(Engine.from_checkpoint(MODEL_DIR, config), {str(each.id): each for each in asked})

    steps, reached, may_go_on = [0], threading.Event(), threading.Event()
    step = Engine.step

    def step_or_wait(self: Engine) -> Any:
        outputs = step(self)
        steps[0] += bool(outputs)
        if steps[0] == 12:
            reached.set()
            may_go_on.wait(WAIT_S)
        return outputs

    monkeypatch.setattr(Engine, "step", step_or_wait)
    service = real_service(redis_url, MODEL_DIR, config)
    async with serving(service):
        try:
            for request in asked:
                await redis.xadd(keys.requests("q"), request.to_entry())  # type: ignore[arg-type]
            await asyncio.to_thread(reached.wait, WAIT_S)
            await send(redis, id="urgent", prompt="Is it noon?", max_tokens=3)
            await eventually(lambda: redis.exists(keys.state("q", "urgent")))
        finally:
            may_go_on.set()
        await read_reply(redis, "urgent")
        replies = [await read_reply(redis, str(request.id)) for request in asked]
    assert service.metrics.handed_back._value.get() == 1
    assert [reply.choices(2) for reply in replies] == list(expected.values())
    assert any(len(reply.owners) == 2 for reply in replies)

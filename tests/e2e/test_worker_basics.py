"""One worker on a real server, as a reader with raw XADD and XREAD sees it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.engine.generation_defaults import GenerationDefaults
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text, expected_tokens, fake_model
from penstock.worker.config import WorkerConfig
from penstock.worker.service import Model, Say, WorkerService
from tests.support.patience import eventually
from tests.support.programs.fakes import ranked
from tests.support.programs.worker_harness import QUICK, is_queue_empty, read_reply, read_until, running_worker, send


async def test_flat_fields_give_a_whole_reply_under_the_entry_id(redis_url: str, redis: RedisClient) -> None:
    async with running_worker(redis_url):
        entry_id = await send(redis, prompt="hello", max_tokens=20, seed=7)
        reply = await read_reply(redis, entry_id)
        await eventually(lambda: is_queue_empty(redis))
    assert reply.text() == expected_text("hello", 7, 20)
    assert reply.tokens() == expected_tokens(b"hello", 7, 0, 20)
    assert ranked(reply.ids) == [f"1-{number}" for number in range(len(reply.ids))]
    end = reply.end
    assert (end.finish_reason, end.prompt_tokens, end.cached_tokens, end.completion_tokens) == ("length", 5, 4, 20)
    times = [end.queued_ms, end.ttft_ms, end.total_ms]
    assert None not in times
    assert [0, *times, 10_000] == sorted([0, *times, 10_000])  # type: ignore[type-var]


async def test_json_request_with_chat_and_two_choices(redis_url: str, redis: RedisClient) -> None:
    request = {"id": "two", "messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 9, "logprobs": 1}
    async with running_worker(redis_url):
        await send(redis, request=json.dumps(request))
        reply = await read_reply(redis, "two")
    for index in (0, 1):
        tokens = expected_tokens(b"user:hi", "two", index, 9)
        assert reply.tokens(index) == tokens
        last = [chunk for chunk in reply.chunks if chunk.index == index][-1]
        assert last.finish_reason == "length"
        assert last.logprobs is not None
        assert [(top.id, top.logprob) for top in last.logprobs[-1].top] == [(tokens[-1], -0.5)]
    assert reply.end.finish_reasons == ("length", "length")
    assert reply.end.completion_tokens == 18


@pytest.mark.parametrize("ignored", [("num_beams=4", "suppress_tokens=[5]"), ()])
async def test_what_the_model_asks_for_and_does_not_get_is_logged_once(
    redis_url: str, ignored: tuple[str, ...]
) -> None:
    def load(_: Say) -> Model:
        return replace(fake_model(), defaults=GenerationDefaults(eos_token_ids=(), ignored=ignored))

    service = WorkerService(WorkerConfig(**QUICK), redis_url, load)
    with capture_logs() as lines:
        work = asyncio.create_task(service.run())
        await eventually(lambda: service.readiness.is_ready or work.done())
        service.request_drain()
        await work
    told = [line for line in lines if line["event"] == "generation_config_ignored"]
    assert [(line["log_level"], line["fields"]) for line in told] == ([("warning", list(ignored))] if ignored else [])


async def test_requests_from_before_the_group_are_seen(redis_url: str, redis: RedisClient) -> None:
    entry_id = await send(redis, prompt="early", max_tokens=2)
    async with running_worker(redis_url):
        assert (await read_reply(redis, entry_id)).text() == expected_text("early", entry_id, 2)


async def test_reply_and_state_expire(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine()
    async with running_worker(redis_url, engine, reply_ttl_s=1000, reply_ttl_after_end_s=100):
        engine.hold()
        await send(redis, prompt="x", id="x", max_tokens=1)
        await read_until(redis, "x", lambda entry: entry.type == "own")
        for key in (keys.reply("q", "x"), keys.state("q", "x")):
            assert 990_000 < await redis.pttl(key) <= 1_000_000
        engine.allow()
        await read_reply(redis, "x")
        for key in (keys.reply("q", "x"), keys.state("q", "x")):
            assert 90_000 < await redis.pttl(key) <= 100_000


@pytest.mark.parametrize(
    ("reason", "more"),
    [
        ("length", {}),
        ("cancelled", {}),
        ("expired", {"timeout_s": 0.001}),
        ("error", {"prompt": "x" * 200}),
    ],
)
async def test_a_reply_is_kept_as_its_request_says(
    redis_url: str, redis: RedisClient, reason: str, more: dict[str, Any]
) -> None:
    if reason == "cancelled":
        await redis.set(keys.cancel("q", "x"), 1)
    await send(redis, **{"prompt": "x", "id": "x", "keep_s": 250_000, "max_tokens": 5, **more})
    async with running_worker(redis_url, FakeEngine(max_model_len=100), reply_ttl_after_end_s=100):
        assert (await read_reply(redis, "x")).end.finish_reason == reason
        for key in (keys.reply("q", "x"), keys.state("q", "x")):
            assert 240_000 < await redis.ttl(key) <= 250_000


async def test_expiry_is_renewed_while_a_reply_is_written(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine(step_s=0.01)
    async with running_worker(redis_url, engine, reply_ttl_s=0.5):
        await send(redis, prompt="x", id="x", max_tokens=100)
        reply = await read_reply(redis, "x")
    assert reply.tokens() == expected_tokens(b"x", "x", 0, 100)


async def test_first_chunk_comes_at_once_and_later_ones_are_joined(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine(step_s=0.002)
    async with running_worker(redis_url, engine, flush_interval_ms=60_000):
        await send(redis, prompt="x", id="x", max_tokens=100)
        await read_until(redis, "x", lambda entry: entry.type == "chunk")
        await send(redis, prompt="y", id="y", max_tokens=10**6)
        await read_until(redis, "y", lambda entry: entry.type == "chunk")  # not held up by the other's waiting chunk
        reply = await read_reply(redis, "x")
        await redis.set(keys.cancel("q", "y"), 1)
    sizes = [len(chunk.tokens) for chunk in reply.chunks]
    assert sum(sizes) == 100
    assert sizes[0] < 10
    assert len(sizes) == 2


async def test_queue_is_read_no_further_than_the_engine_has_room(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine(max_num_seqs=2)
    engine.hold()
    async with running_worker(redis_url, engine):
        ids = [await send(redis, prompt=f"p{i}", max_tokens=3) for i in range(7)]
        await eventually(lambda: len(engine.prefilled) == 2)
        pending = await redis.xpending(keys.requests("q"), keys.GROUP)
        assert [each["pending"] for each in pending["consumers"] if each["name"] != keys.WAITING] == [2]
        engine.allow()
        for i, entry_id in enumerate(ids):
            assert (await read_reply(redis, entry_id)).text() == expected_text(f"p{i}", entry_id, 3)
        assert engine.most_rows <= 2


async def test_held_back_text_is_whole(redis_url: str, redis: RedisClient) -> None:
    async with running_worker(redis_url, FakeEngine(holds_back=True)):
        await send(redis, prompt="x", id="x", max_tokens=12, n=3)
        reply = await read_reply(redis, "x")
    for index in range(3):
        assert reply.text(index) == expected_text("x", "x", 12, index)


async def test_two_workers_share_a_queue(redis_url: str, redis: RedisClient) -> None:
    engines = [FakeEngine(max_num_seqs=4, step_s=0.001) for _ in range(2)]
    async with running_worker(redis_url, engines[0]), running_worker(redis_url, engines[1]):
        ids = [await send(redis, prompt=f"p{i}", max_tokens=10) for i in range(60)]
        replies = await asyncio.gather(*(read_reply(redis, entry_id) for entry_id in ids))
        await eventually(lambda: is_queue_empty(redis))
    for i, (entry_id, reply) in enumerate(zip(ids, replies, strict=True)):
        assert reply.text() == expected_text(f"p{i}", entry_id, 10)
        assert len(reply.owners) == 1
    assert sorted(engines[0].prefilled + engines[1].prefilled) == sorted(ids)
    assert engines[0].prefilled
    assert engines[1].prefilled


async def test_same_id_twice_is_generated_once(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine()
    engine.hold()
    async with running_worker(redis_url, engine) as worker:
        for _ in range(2):
            await send(redis, prompt="x", id="same", max_tokens=5)
        await eventually(worker.service.metrics.duplicates._value.get)
        engine.allow()
        reply = await read_reply(redis, "same")
        await send(redis, prompt="x", id="same", max_tokens=5)  # after its end, too
        await eventually(lambda: is_queue_empty(redis))
        assert await redis.xlen(keys.reply("q", "same")) == len(reply.entries)
    assert engine.prefilled == ["same"]


async def test_a_duplicate_runs_if_the_first_entry_was_deleted(redis_url: str, redis: RedisClient) -> None:
    first = await send(redis, prompt="x", id="same", max_tokens=5)
    await redis.hset(keys.state("q", "same"), mapping={"entry": first, "epoch": 1, "status": "queued"})
    await redis.xdel(keys.requests("q"), first)
    await send(redis, prompt="x", id="same", max_tokens=5)
    async with running_worker(redis_url):
        assert (await read_reply(redis, "same")).text() == expected_text("x", "same", 5)


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_shortest_replies(redis_url: str, redis: RedisClient, max_tokens: int) -> None:
    async with running_worker(redis_url):
        await send(redis, prompt="x", id="x", max_tokens=max_tokens)
        reply = await read_reply(redis, "x")
    assert reply.text() == expected_text("x", "x", max_tokens)
    assert all(isinstance(entry, ChunkEntry) for entry in reply.entries[1:-1])


async def test_two_queues_may_hand_out_the_same_entry_ids(redis_url: str, redis: RedisClient) -> None:
    await redis.set(keys.cancel("other", "1-2"), 1)
    for queue in ("q", "other"):
        for number in (1, 2):
            entry = {"prompt": f"{queue} {number}", "max_tokens": 5}
            await redis.xadd(keys.requests(queue), entry, id=f"1-{number}")  # type: ignore[arg-type]
    async with running_worker(redis_url), running_worker(redis_url, queue="other"):
        replies = {
            (queue, number): await read_reply(redis, f"1-{number}", queue=queue)
            for queue in ("q", "other")
            for number in (1, 2)
        }
    assert replies.pop(("other", 2)).end.finish_reason == "cancelled"
    for (queue, number), reply in replies.items():
        assert reply.text() == expected_text(f"{queue} {number}", f"1-{number}", 5)

"""Workers tell how far a long prompt is. When one dies within it, that is not part of its heir's reply."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import Engine, EngineConfig
from penstock.engine.demo import MODEL_DIR
from penstock.local.embedded import dies_with_parent
from penstock.producer import AsyncClient, Client, GenerateRequest, Reply
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry, OwnEntry, ReplyEntry
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text
from penstock.worker.publish import outbox
from penstock.worker.settings_loading import flag
from tests.e2e.real_engines import real_worker, undisturbed
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import is_queue_empty, read_reply, read_until, running_worker, send
from tests.support.programs.worker_process import WorkerProcess

SIZES: dict[str, Any] = {
    "max_num_seqs": 4, "max_batch_tokens": 16, "num_pages": 200, "max_model_len": 1024, "decode_steps": 1,
}  # fmt: skip
SLOW_WORKER = """
import sys, time
from penstock.cli import main
from penstock.engine import Engine
step = Engine.step
Engine.step = lambda self: (time.sleep(0.05), step(self))[1]
sys.exit(main())
"""
ASKED: dict[str, dict[str, Any]] = {
    "sampled": {"n": 2, "seed": 3, "temperature": 1.0, "max_tokens": 40, "ignore_eos": True},
    "stopped": {"n": 2, "seed": 4, "temperature": 1.2, "max_tokens": 60, "ignore_eos": True},
}


def request(name: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest.model_validate({"id": name, "prompt": f"{name}: a river. " * 50, **ASKED[name], **fields})


def tells_prefill(entry: ReplyEntry) -> bool:
    return isinstance(entry, ChunkEntry) and entry.prefill_done is not None


async def test_a_prompt_is_begun_again_and_gives_the_same(
    redis_url: str, redis: RedisClient, compile_cache: Path, tmp_path: Path
) -> None:
    """The real engine, killed a second after it began; its heir ends two choices each, with seeds and a stop string."""
    settings = {**SIZES, "compile_cache_dir": compile_cache}
    engine = Engine.from_checkpoint(MODEL_DIR, EngineConfig(**settings))
    text = undisturbed(engine, {"stopped": request("stopped")})["stopped"][0][0]
    asked = [request("sampled"), request("stopped", stop=(text[20:24],))]
    expected = undisturbed(engine, {str(each.id): each for each in asked})
    values = {
        **settings,
        "redis_url": redis_url,
        "queue": "q",
        "model": MODEL_DIR,
        "name": "victim",
        "health_port": "none",
    }
    flags = [part for name, value in values.items() for part in (flag(name), str(value))]
    with (tmp_path / "log").open("w") as log:
        victim = subprocess.Popen(  # noqa: ASYNC220  it is killed before anything else is waited for
            [*dies_with_parent(), sys.executable, "-c", SLOW_WORKER, "worker", *flags], stdout=log, stderr=log
        )
    try:
        async with AsyncClient(redis_url, queue="q") as client:
            for each in asked:
                await client.submit(each)
            for each in asked:
                await read_until(redis, str(each.id), tells_prefill)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait(WAIT_S)
    async with real_worker(redis_url, MODEL_DIR, EngineConfig(**settings)):
        replies = {str(each.id): await read_reply(redis, str(each.id)) for each in asked}
        await eventually(lambda: is_queue_empty(redis))
    for name, reply in replies.items():
        assert len(reply.owners) == 2
        assert reply.choices(2) == expected[name], name
        assert all(0 < done < total for done, total in reply.prefills)
        assert await redis.hmget(keys.state("q", name), "strikes", "begun") == ["1", None]


async def test_a_prompt_that_kills_workers_within_it_goes_to_the_dead_letters(
    redis_url: str, redis: RedisClient, tmp_path: Path
) -> None:
    """How far it was is not progress: each death counts."""
    slow = {"prefill_steps": 2000, "step_s": 0.02}
    await send(redis, prompt="a long one", id="r", max_tokens=3)
    for name in ("first", "second"):
        with WorkerProcess(redis_url, tmp_path / name, engine=slow, name=name) as victim:
            await read_until(redis, "r", Told(name))
            victim.kill()
    async with running_worker(redis_url, max_attempts=2):
        reply = await read_reply(redis, "r")
    assert (reply.end.finish_reason, reply.end.code) == ("error", "too_many_crashes")


class Told:
    """Whether the entries so far end with what this worker says of the prompt."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._owner = ""

    def __call__(self, entry: ReplyEntry) -> bool:
        if isinstance(entry, OwnEntry):
            self._owner = entry.worker
        return self._owner == self._worker and tells_prefill(entry)


@pytest.mark.parametrize("ask", ["async", "blocking"])
async def test_clients_see_how_far_a_prompt_is(redis_url: str, monkeypatch: pytest.MonkeyPatch, ask: str) -> None:
    monkeypatch.setattr(outbox, "PREFILL_NEWS_S", 0.0)
    seen: list[tuple[int, int]] = []
    engine = FakeEngine(prefill_steps=4)
    engine.hold()
    async with running_worker(redis_url, engine):
        reading = asyncio.create_task(
            read(redis_url, seen) if ask == "async" else asyncio.to_thread(read_blocking, redis_url, seen)
        )
        for step in range(4):
            engine.allow(1)
            await eventually(partial(has_seen, seen, step + 1))
        engine.allow()
        reply = await asyncio.wait_for(reading, WAIT_S)
    assert reply is not None
    assert (reply.text, reply.usage.completion_tokens) == (expected_text("abcdefghij", "r", 3), 6)
    assert seen == [(done, 10) for done in (2, 4, 6, 8)]


def has_seen(seen: list[tuple[int, int]], count: int) -> bool:
    return len(seen) >= count


async def read(url: str, seen: list[tuple[int, int]]) -> Reply | None:
    async with AsyncClient(url, queue="q") as client:
        stream = client.stream("abcdefghij", id="r", max_tokens=3, n=2)
        stream.on_prefill(lambda prefill: seen.append((prefill.done, prefill.total)))
        await stream.read_to_end()
        assert stream.prefill is None
        return stream.reply


def read_blocking(url: str, seen: list[tuple[int, int]]) -> Reply | None:
    with Client(url, queue="q") as client, client.stream("abcdefghij", id="r", max_tokens=3, n=2) as stream:
        stream.on_prefill(lambda prefill: seen.append((prefill.done, prefill.total)))
        assert "".join(chunk.text for chunk in stream if chunk.index == 0)
        assert stream.prefill is None
        return stream.reply

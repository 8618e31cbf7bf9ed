"""When Redis refuses, a serving worker waits, says so, and goes on once Redis lets it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
import structlog
from redis import exceptions
from structlog.testing import capture_logs

from penstock.protocol import keys
from penstock.protocol.redis import pipeline
from penstock.protocol.redis.address import parse_url
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text
from penstock.worker.errors import RedisRefused
from tests.support.patience import eventually
from tests.support.programs.worker_harness import Running, is_queue_empty, read_reply, read_until, running_worker, send
from tests.support.redis_servers.refusing_proxy import FULL, PASSING, REFUSED, RefusingProxy

TOKENS = 40
ANSWERS = {**PASSING, "max number of clients": FULL, **REFUSED}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    in_worker = [f"worker.{name}" for name in ("session", "presence.heartbeat", "calls.server")]
    for name in ("serving.readiness", "serving.refusals", *in_worker):
        monkeypatch.setattr(f"penstock.{name}._log", structlog.get_logger())
    with capture_logs() as captured:
        yield captured


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[RefusingProxy]:
    async with RefusingProxy(redis_url) as proxy:
        yield proxy


async def ends_well(redis: RedisClient, *ids: str) -> None:
    for request_id in ids:
        reply = await read_reply(redis, request_id)
        assert reply.text() == expected_text("x", request_id, TOKENS)
        assert len(reply.tokens()) == TOKENS
        assert len(reply.owners) == 1
    await eventually(lambda: is_queue_empty(redis))


async def trouble_of(worker: Running) -> set[str]:
    page, _ = await worker.service._scrape("")
    samples = (line.split() for line in page.decode().splitlines() if line.startswith("penstock_redis_trouble{"))
    return {name.partition('kind="')[2].partition('"')[0] for name, value in samples if float(value)}


def refuse(proxy: RefusingProxy, answer: str) -> None:
    if answer == FULL:
        proxy.greeting = answer
        proxy.cut()
    else:
        proxy.refuse(answer)


async def test_a_worker_outlasts_every_refusal(proxy: RefusingProxy, redis: RedisClient, lines: list[Any]) -> None:
    engine = FakeEngine(step_s=0.002)
    async with running_worker(proxy.url, engine, heartbeat_ttl_s=30) as worker:
        for place, (code, answer) in enumerate(ANSWERS.items()):
            await send(redis, prompt="x", id=f"before-{place}", max_tokens=TOKENS)
            await read_until(redis, f"before-{place}", lambda entry: entry.type == "chunk")
            lines.clear()
            refuse(proxy, answer)
            await send(redis, prompt="x", id=f"meanwhile-{place}", max_tokens=TOKENS)
            await eventually(lambda: len(worker.service.readiness.reasons) >= 4)
            words = answer.partition(" ")[2].rstrip(".")
            reasons = worker.service.readiness.reasons.values()
            await eventually(lambda: any(words in reason for reason in reasons))  # noqa: B023
            kind = "refused" if code in REFUSED else "passing"
            assert await trouble_of(worker) == {kind}, code
            proxy.allow()
            await ends_well(redis, f"before-{place}", f"meanwhile-{place}")
            await eventually(lambda: worker.service.readiness.is_ready)
            assert not worker.task.done()
            assert await trouble_of(worker) == set()
            said = [line["event"] for line in lines if line["log_level"] in ("warning", "error")]
            assert said == ["redis_unavailable"], (code, lines)


@pytest.mark.every_server
async def test_missing_replicas_end_no_fleet(redis_url: str, redis: RedisClient) -> None:
    async with running_worker(redis_url, reclaim_interval_s=0.05) as idle, running_worker(redis_url) as other:
        await redis.config_set("min-replicas-to-write", 1)
        try:
            await eventually(lambda: "reclaimer" in idle.service.readiness.reasons)
            await eventually(lambda: not other.service.readiness.is_ready)
        finally:
            await redis.config_set("min-replicas-to-write", 0)
        await send(redis, prompt="x", id="x", max_tokens=TOKENS)
        await ends_well(redis, "x")
        await eventually(lambda: idle.service.readiness.is_ready and other.service.readiness.is_ready)


@pytest.mark.every_server
async def test_a_stranger_s_script_ends_no_fleet(redis_url: str, redis: RedisClient) -> None:
    async with running_worker(redis_url, FakeEngine(step_s=0.002), reclaim_interval_s=0.05) as worker:
        await send(redis, prompt="x", id="x", max_tokens=TOKENS)
        await read_until(redis, "x", lambda entry: entry.type == "chunk")
        await redis.config_set("busy-reply-threshold", 50)
        async with aclosing(connect(redis_url, decode=True, retries=0)) as stranger:
            script = asyncio.ensure_future(stranger.eval("while true do end", 0))
            await eventually(lambda: len(worker.service.readiness.reasons) >= 4)
            assert worker.service.readiness.trouble == "passing"
            await redis.script_kill()
            with pytest.raises(exceptions.ResponseError):
                await script
        await redis.config_set("busy-reply-threshold", 5000)
        await ends_well(redis, "x")
        await eventually(lambda: worker.service.readiness.is_ready)


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
async def test_silence_is_outlasted(
    proxy: RefusingProxy, redis: RedisClient, lines: list[Any], monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    monkeypatch.setattr("penstock.protocol.redis.connection.COMMAND_TIMEOUT_S", 1.0)
    monkeypatch.setitem(pipeline.execute.__kwdefaults__, "timeout_s", 1.0)  # type: ignore[arg-type]
    async with running_worker(proxy.url, FakeEngine(step_s=0.002), heartbeat_ttl_s=30) as worker:
        ids = ["after"]
        if is_busy:
            ids += ["before"]
            await send(redis, prompt="x", id="before", max_tokens=TOKENS)
            await read_until(redis, "before", lambda entry: entry.type == "chunk")
        lines.clear()
        proxy.is_answering.clear()
        await eventually(lambda: len(worker.service.readiness.reasons) >= 4)
        assert await trouble_of(worker) == {"away"}
        await send(redis, prompt="x", id="after", max_tokens=TOKENS)
        proxy.is_answering.set()
        await ends_well(redis, *ids)
        await eventually(lambda: worker.service.readiness.is_ready)
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == ["redis_unavailable"]


@pytest.mark.every_server
async def test_nobody_is_taken_for_dead_because_no_beat_was_taken(redis_url: str, redis: RedisClient) -> None:
    engines = [FakeEngine(step_s=0.002, max_num_seqs=1) for _ in range(2)]
    async with running_worker(redis_url, engines[0]) as one, running_worker(redis_url, engines[1]) as other:
        for request_id in ("x", "y"):
            await send(redis, prompt="x", id=request_id, max_tokens=TOKENS * 40)
        for request_id in ("x", "y"):
            await read_until(redis, request_id, lambda entry: entry.type == "chunk")
        beats = [keys.heartbeat("q", worker.service.config.name) for worker in (one, other)]
        await redis.config_set("min-replicas-to-write", 1)
        try:
            await eventually(lambda: _none(redis.exists(*beats)))
            await asyncio.sleep(0.5)  # for both to have looked in vain
        finally:
            await redis.config_set("min-replicas-to-write", 0)
        replies = [await read_reply(redis, request_id) for request_id in ("x", "y")]
        lost = [worker.service.metrics.lost_workers._value.get() for worker in (one, other)]
    assert lost == [0, 0]
    assert [len(reply.owners) for reply in replies] == [1, 1]
    assert [len(reply.tokens()) for reply in replies] == [TOKENS * 40] * 2


async def _none(count: Awaitable[int]) -> bool:
    return await count == 0


async def test_what_is_refused_for_too_long_ends_the_worker_in_good_order(
    proxy: RefusingProxy, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.serving.refusals.LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("penstock.worker.session.HAND_BACK_TIMEOUT_S", 0.1)
    monkeypatch.setattr("penstock.worker.session.GOODBYE_TIMEOUT_S", 0.1)
    engine = FakeEngine(step_s=0.002)
    options: dict[str, Any] = {"refused_drain_after_s": 0.2, "drain_timeout_s": 0.1}
    async with running_worker(proxy.url, engine, **options) as worker:
        await send(redis, prompt="x", id="x", max_tokens=10**6)
        await read_until(redis, "x", lambda entry: entry.type == "chunk")
        proxy.refuse(PASSING["OOM"])
        await eventually(lambda: not worker.service.readiness.is_ready)
        await asyncio.sleep(0.3)  # a passing refusal is waited for without end
        assert not worker.task.done()
        proxy.refuse(REFUSED["NOPERM"])
        with pytest.raises(RedisRefused, match="no permissions"):
            await worker.task


async def test_new_credentials_are_found_while_the_worker_runs(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.protocol.redis.credentials.READ_EVERY_S", 0.01)
    monkeypatch.setattr("penstock.serving.refusals.LOOK_EVERY_S", 0.01)

    async def login(name: str, *rules: str) -> None:
        await redis.execute_command("ACL SETUSER", name, "reset", "on", f">{name}", "~*", "&*", *rules)

    def url(name: str) -> str:
        return redis_url.replace("//", f"//{name}:{name}@")

    setting = url("old")
    await login("old", "+@all")
    async with running_worker(redis_url, FakeEngine(step_s=0.002), at=parse_url(setting).reading(lambda: setting)) as w:
        await send(redis, prompt="x", id="x", max_tokens=TOKENS)
        await login("old", "-@all")  # its connections stay, and may do nothing: none is made anew by itself
        await eventually(lambda: w.service.readiness.trouble == "refused")
        await login("new", "+@all")
        setting = url("new")
        await ends_well(redis, "x")
        await eventually(lambda: w.service.readiness.is_ready)
    await redis.execute_command("ACL DELUSER", "old", "new")

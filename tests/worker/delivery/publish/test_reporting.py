"""Reports of a worker about itself, for operators."""

from __future__ import annotations

from typing import Any

from penstock.protocol import keys
from penstock.protocol.operations.collector import look
from penstock.protocol.operations.reports import MAX_REPORTED, WorkerReport, decode_report
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine
from tests.support.patience import eventually
from tests.support.programs.worker_harness import running_worker, send


async def report_of(raw: RedisClient, worker: str) -> WorkerReport | None:
    text: Any = await raw.get(keys.report("q", worker))
    return None if text is None else decode_report(text)


async def test_a_report_is_bounded_and_says_how_many_it_leaves_out(redis_url: str, raw: RedisClient) -> None:
    count = MAX_REPORTED + 20
    engine = FakeEngine(max_num_seqs=count)
    engine.hold()
    for number in range(count):
        await send(raw, prompt="x", id=f"r{number}", max_tokens=1)
    async with running_worker(redis_url, engine, name="w"):

        async def has_all() -> bool:
            report = await report_of(raw, "w")
            return report is not None and report.num_requests == count

        await eventually(has_all)
        report = await report_of(raw, "w")
        assert report is not None
        assert len(report.requests) == MAX_REPORTED
        assert [each.claimed_ms for each in report.requests] == sorted(each.claimed_ms for each in report.requests)
        now = await look(raw, "q")
        assert (now.num_running, len(now.running)) == (count, MAX_REPORTED)
        engine.allow()


async def test_a_report_s_phases_and_rate(redis_url: str, raw: RedisClient) -> None:
    engine = FakeEngine(step_s=0.005)
    async with running_worker(redis_url, engine, name="w"):
        await send(raw, prompt="x", id="r", max_tokens=10**6, tenant="acme")

        async def generates() -> bool:
            report = await report_of(raw, "w")
            return report is not None and report.tokens_per_s > 0

        await eventually(generates)
        report = await report_of(raw, "w")
        assert report is not None
        (request,) = report.requests
        assert (request.id, request.tenant, request.phase, request.turn) == ("r", "acme", "running", 1)
        assert request.enqueued_ms <= request.claimed_ms
        engine.hold()

        async def is_still() -> bool:
            report = await report_of(raw, "w")
            return report is not None and report.tokens_per_s == 0

        await eventually(is_still)  # the mean forgets
        await raw.set(keys.cancel("q", "r"), 1)
        engine.allow()


async def is_listed(redis: RedisClient, worker: str) -> bool:
    return await redis.type(keys.reports("q")) == b"zset" and await redis.zscore(keys.reports("q"), worker) is not None


async def test_what_somebody_else_wrote_in_its_place_is_overwritten(redis_url: str, raw: RedisClient) -> None:
    await raw.lpush(keys.report("q", "w"), "x")
    await raw.set(keys.reports("q"), "x")
    async with running_worker(redis_url, name="w") as worker:
        await eventually(lambda: is_listed(raw, "w"))
        assert await report_of(raw, "w") is not None
        await eventually(lambda: worker.service.readiness.is_ready)  # again

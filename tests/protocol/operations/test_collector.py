"""One look at a queue with real workers and real lanes, or with junk in their place."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import aclosing
from pathlib import Path

import pytest

from penstock.protocol import keys, scripts
from penstock.protocol.operations.collector import look
from penstock.protocol.operations.reports import REMEMBERED_S, ReportedRequest, WorkerReport
from penstock.protocol.operations.snapshot import SILENT_AFTER_S, Worker
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.tools.chaos.fake_engine import FakeEngine, fake_model
from penstock.worker.config import WorkerConfig
from penstock.worker.service import Model, Say, WorkerService
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import QUICK, read_until, running_worker, send
from tests.support.programs.worker_process import WorkerProcess

SECRET = "a secret prompt"
IN_FLIGHT_MS = 50  # what a worker sent before it was killed, and the server had not read yet


def is_chunk(entry: object) -> bool:
    return getattr(entry, "type", None) == "chunk"


async def worker_of(raw: RedisClient, name: str) -> Worker | None:
    return next((worker for worker in (await look(raw, "q")).workers if worker.name == name), None)


async def state_of(raw: RedisClient, name: str) -> str | None:
    worker = await worker_of(raw, name)
    return None if worker is None else worker.state


@pytest.mark.every_server
async def test_a_queue_that_nobody_ever_used(raw: RedisClient) -> None:
    empty = await look(raw, "q")
    assert (empty.workers, empty.running, empty.lanes, empty.letters) == ((), (), (), ())
    assert (empty.num_waiting, empty.num_running, empty.num_dead, empty.num_malformed) == (0, 0, 0, 0)
    assert (empty.load, empty.card, empty.oldest_s, empty.tokens_per_s) == (None, None, None, 0)


@pytest.mark.every_server
async def test_what_runs_and_what_waits(redis_url: str, redis: RedisClient, raw: RedisClient) -> None:
    engine = FakeEngine(max_num_seqs=2, step_s=0.005)
    async with running_worker(redis_url, engine, name="w"):
        for number in range(2):
            await send(redis, prompt=SECRET, id=f"r{number}", tenant="acme", max_tokens=10**6)
            await read_until(redis, f"r{number}", is_chunk)
        for number, priority in enumerate((0, 0, 7)):
            await send(redis, prompt=SECRET, id=f"w{number}", tenant="other", priority=priority)

        looks = []

        async def is_told() -> bool:
            """Checks everything at once: on a busy machine a worker may be silent for a moment."""
            looks.append(now := await look(raw, "q"))
            bands = {lane.priority: lane.num_requests for lane in now.lanes}
            return len(now.running) == 2 and bands == {7: 1, 0: 2} and now.tokens_per_s > 0 and now.slots == 2

        await eventually(is_told)
        now = looks[-1]
        assert [(each.id, each.worker, each.tenant, each.takeovers) for each in now.running] == [
            ("r0", "w", "acme", 0), ("r1", "w", "acme", 0),
        ]  # fmt: skip
        assert all(each.tokens > 0 and each.age_s >= each.running_s > 0 for each in now.running)
        assert now.running[0].prompt_tokens == len(SECRET)
        assert (now.num_running, now.num_waiting, now.num_new, now.slots) == (2, 3, 0, 2)
        assert (now.oldest_s or 0) > 0
        (tenant,) = now.lanes[0].tenants  # it is in the band of what it has next
        assert (tenant.name, tenant.priority, tenant.num_waiting) == ("other", 7, 1)
        (shown,) = now.workers
        assert (shown.state, shown.is_draining, shown.report and shown.report.pages) == ("live", False, 100)
        assert 0 <= (shown.heartbeat_s or 0) <= 1.0
        for key in await raw.keys("penstock:{q}:report*"):
            text = await raw.get(key) if await raw.type(key) == b"string" else b""
            assert SECRET.encode() not in (text or b"")
        document = now.to_document()
        assert document["workers"][0]["state"] == "live"
        assert SECRET not in str(document)
        for number in range(2):
            await redis.set(keys.cancel("q", f"r{number}"), 1)


@pytest.mark.every_server
async def test_a_worker_says_how_it_comes_and_goes(redis_url: str, raw: RedisClient) -> None:
    engine = FakeEngine()
    async with running_worker(redis_url, engine, name="w") as worker:
        await eventually(lambda: _is(raw, "w", "live"))
        engine.hold()
        await send(raw, prompt="x", id="r", max_tokens=5)
        await eventually(lambda: len(engine.prefilled))
        worker.service.request_drain()
        await eventually(lambda: _is(raw, "w", "draining"))
        engine.allow()
        await worker.task
        assert await worker_of(raw, "w") is None  # it took its report back
        assert await raw.keys("penstock:{q}:report*") == []


async def _is(raw: RedisClient, name: str, state: str) -> bool:
    return await state_of(raw, name) == state


async def test_one_that_loads_is_there_before_it_serves(redis_url: str, raw: RedisClient) -> None:
    """A worker that loads is listed even before it has joined the group."""
    is_loaded = threading.Event()

    def load(say: Say) -> Model:
        say("loading the model: 1/2 GB")
        is_loaded.wait()
        return fake_model()

    service = WorkerService(WorkerConfig(**{**QUICK, "name": "new"}), redis_url, load)
    running = asyncio.create_task(service.run())
    try:
        await eventually(lambda: _is(raw, "new", "starting"))
        await eventually(lambda: _says(raw, "new", "loading the model: 1/2 GB"))
        is_loaded.set()
        await eventually(lambda: _is(raw, "new", "live"))
    finally:
        is_loaded.set()
        service.request_drain()
        await running
    assert await worker_of(raw, "new") is None


async def _says(raw: RedisClient, name: str, unready: str) -> bool:
    worker = await worker_of(raw, name)
    return worker is not None and worker.report is not None and worker.report.unready == unready


async def test_one_that_is_told_to_stop_while_it_loads_leaves_nothing(redis_url: str, raw: RedisClient) -> None:
    is_over = threading.Event()

    def load(_: Say) -> Model:
        is_over.wait()
        return fake_model()

    service = WorkerService(WorkerConfig(**{**QUICK, "name": "new"}), redis_url, load)
    running = asyncio.create_task(service.run())
    await eventually(lambda: _is(raw, "new", "starting"))
    service.request_drain()
    await running
    is_over.set()
    assert await worker_of(raw, "new") is None
    assert await raw.keys("penstock:{q}:report*") == []


async def _report(raw: RedisClient, worker: str, report: WorkerReport, *, ttl_ms: int = 10**6) -> None:
    listed_ms = round(REMEMBERED_S * 1000)
    said = scripts.report("q", worker=worker, text=report.encode(), ttl_ms=ttl_ms, listed_ms=listed_ms)
    await raw.execute_command(*said)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_kill_and_a_freeze_are_seen_within_two_seconds(
    redis_url: str, raw: RedisClient, tmp_path: Path, number: signal.Signals
) -> None:
    """No look taken `SILENT_AFTER_S` after the kill says `live`. `top` looks once a second: two seconds in all.

    Both times are the server's, so how busy this machine is does not matter.
    """
    with WorkerProcess(redis_url, tmp_path / "log", name="w", heartbeat_ttl_s=10.0, engine={"step_s": 0.01}) as worker:
        await eventually(lambda: _is(raw, "w", "live"))
        await send(raw, prompt="x", id="r", max_tokens=10**6)
        await eventually(lambda: _runs(raw, "r"))
        worker.send(number)
        last = first = await look(raw, "q")
        async with asyncio.timeout(WAIT_S):
            while (now := await look(raw, "q")).workers[0].state == "live":
                last = now
                await asyncio.sleep(0.02)
        assert now.workers[0].state == "silent"
        assert last.at_ms - first.at_ms <= 1000 * SILENT_AFTER_S + IN_FLIGHT_MS
        assert [each.id for each in now.running] == ["r"]  # what it had is still known


async def _runs(raw: RedisClient, request_id: str) -> bool:
    return any(each.id == request_id for each in (await look(raw, "q")).running)


async def test_a_lost_worker_is_listed_and_what_it_had_is_of_its_heir(redis_url: str, raw: RedisClient) -> None:
    had = ReportedRequest(id="r", enqueued_ms=1, claimed_ms=2, turn=1)
    await _report(raw, "dead", WorkerReport(version="1", phase="serving", slots=1, requests=(had,)))
    await _report(raw, "slow", WorkerReport(version="1", phase="serving", slots=1, requests=(had,)))
    heirs = had.model_copy(update={"claimed_ms": 3, "turn": 2})
    await _report(raw, "heir", WorkerReport(version="1", phase="serving", slots=1, requests=(heirs,)))
    for name in ("slow", "heir"):
        await raw.set(keys.heartbeat("q", name), "i", px=10**6)
    now = await look(raw, "q")
    assert {worker.name: worker.state == "lost" for worker in now.workers} == {
        "dead": True,
        "slow": False,
        "heir": False,
    }
    assert [(each.id, each.worker, each.takeovers) for each in now.running] == [("r", "heir", 1)]


@pytest.mark.every_server
async def test_what_somebody_else_wrote_is_nothing(redis: RedisClient, raw: RedisClient) -> None:
    await redis.set(keys.requests("q"), "x")
    await redis.set(keys.reports("q"), "x")
    await redis.lpush(keys.load("q"), "x")
    await redis.set(keys.dead("q"), "x")
    await redis.hset(keys.card("q"), "model", "x")
    assert (await look(raw, "q")).workers == ()
    await redis.delete(keys.reports("q"), keys.load("q"))
    await _report(raw, "w", WorkerReport(version="1", phase="serving"))
    await redis.set(keys.report("q", "w"), "no report")
    await redis.hset(keys.load("q"), "at_ms", "x")
    now = await look(raw, "q")
    assert [(worker.name, worker.report) for worker in now.workers] == [("w", None)]
    assert (now.load, now.card) == (None, None)


async def test_dead_letters_are_told_without_what_they_hold(redis: RedisClient, raw: RedisClient) -> None:
    for number in range(12):
        letter = {"id": f"r{number}", "code": "c", "worker": "w", "crashes": "3", "field:prompt": SECRET}
        await redis.xadd(keys.dead("q"), letter)  # type: ignore[arg-type]
    now = await look(raw, "q")
    assert (now.num_dead, [each.request_id for each in now.letters]) == (12, [f"r{n}" for n in range(11, 1, -1)])
    assert now.letters[0].crashes == 3
    assert SECRET not in str(now.to_document())


async def test_under_cluster(redis_cluster_url: str) -> None:
    async with (
        aclosing(connect(redis_cluster_url, decode=False)) as raw,
        running_worker(redis_cluster_url, FakeEngine(step_s=0.01), name="w"),
    ):
        await send(raw, prompt="x", id="r", max_tokens=10**6)
        await eventually(lambda: _runs(raw, "r"))
        await eventually(lambda: _is(raw, "w", "live"))
        await raw.set(keys.cancel("q", "r"), 1)

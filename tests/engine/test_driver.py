"""The driver runs an engine on a thread of its own, for an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from penstock.engine import Engine, EngineDriver, InvalidRequest, Output, Request, SamplingParams
from penstock.engine import driver as driver_module
from penstock.engine.driver import DriverStopped
from penstock.engine.request import FinishReason
from penstock.engine.stats import EngineStats
from tests.engine.engines import all_pages_are_free, drive, outputs_of
from tests.support.patience import WAIT_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


async def collect(driver: EngineDriver, request: Request) -> list[int]:
    return [token async for output in outputs_of(driver, request) for token in output.token_ids]


async def test_concurrent_requests_stream_what_the_bare_engine_gives(engine: Engine) -> None:
    requests = [Request(f"r{i}", tuple(range(i + 1, i + 9)), GREEDY) for i in range(6)]
    expected = [drive(engine, [request])[request.id, 0].token_ids for request in requests]
    driver = EngineDriver(engine)
    await driver.start()
    assert await asyncio.gather(*(collect(driver, request) for request in requests)) == expected
    assert driver.spare == engine.max_num_seqs
    await driver.stop()


async def test_forgetting_a_request_frees_what_it_holds(engine: Engine) -> None:
    driver = EngineDriver(engine)
    await driver.start()
    stream = outputs_of(driver, Request("r", (1, 2, 3), SamplingParams(max_tokens=90, ignore_eos=True)))
    await anext(stream)
    assert isinstance(stream, AsyncGenerator)
    await stream.aclose()
    async with asyncio.timeout(WAIT_S):
        while driver.is_active("r"):
            await collect(driver, Request("other", (4,), GREEDY))
    assert all_pages_are_free(engine)
    await driver.stop()


async def test_a_refused_request_and_an_id_in_use_raise_at_once(engine: Engine) -> None:
    driver = EngineDriver(engine)
    await driver.start()
    with pytest.raises(InvalidRequest, match="no tokens"):
        driver.submit(Request("r", ()), lambda output: None)
    driver.submit(Request("r", (1,), GREEDY), lambda output: None)
    with pytest.raises(InvalidRequest, match="running already"):
        driver.submit(Request("r", (1,), GREEDY), lambda output: None)
    await driver.stop()


class BrokenEngine:
    """Fails in its first step, as an engine whose device is gone does."""

    max_num_seqs = 4

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.threads: set[int] = set()

    def check(self, request: Request) -> None:
        pass

    def enqueue(self, request: Request) -> None:
        self.requests.append(request)
        self.threads.add(threading.get_ident())

    def abort(self, request_id: str, reason: FinishReason) -> None:
        raise AssertionError("nobody aborts here")

    def step(self) -> list[Output]:
        raise RuntimeError("the device is gone")

    def slack_s(self) -> float:
        return 0.0

    def has_work(self) -> bool:
        return bool(self.requests)

    def stats(self) -> EngineStats:
        return EngineStats()


async def test_what_ends_the_thread_reaches_whoever_waits() -> None:
    broken = BrokenEngine()
    driver = EngineDriver(broken)
    await driver.start()
    driver.submit(Request("r", (1,), GREEDY), lambda output: None)
    with pytest.raises(RuntimeError, match="the device is gone"):
        await driver.wait_ended()
    with pytest.raises(DriverStopped):
        driver.submit(Request("r2", (1,), GREEDY), lambda output: None)
    assert broken.threads == {next(iter(broken.threads))} != {threading.get_ident()}
    await driver.stop()


class ScriptedEngine:
    """An engine whose requests get a token per step; a step ends when the test says so."""

    max_num_seqs = 4

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}  # tokens so far, tokens in all
        self.num_waiting = 0
        self.num_free_pages = 0
        self.steps = threading.Semaphore(0)
        self.num_begun = 0

    def check(self, request: Request) -> None: ...

    def enqueue(self, request: Request) -> None:
        self.rows[request.id] = [0, request.sampling.max_tokens]

    def abort(self, request_id: str, reason: FinishReason) -> None: ...

    def step(self) -> list[Output]:
        self.num_begun += 1
        self.steps.acquire()
        outputs = []
        for request_id, row in list(self.rows.items()):
            row[0] += 1
            is_last = row[0] == row[1]
            if is_last:
                del self.rows[request_id]
            outputs.append(
                Output(request_id, 0, row[0] - 1, (row[0],), "", finish_reason="length" if is_last else None)
            )
        return outputs

    def slack_s(self) -> float:
        return 0.0

    def has_work(self) -> bool:
        return bool(self.rows)

    def stats(self) -> EngineStats:
        return EngineStats(num_waiting=self.num_waiting, num_free_pages=self.num_free_pages)


class UnhurriedEngine(ScriptedEngine):
    """An engine whose device is busy until there are two requests."""

    def slack_s(self) -> float:
        return 0.0 if len(self.rows) == 2 else WAIT_S


async def test_a_request_that_comes_while_the_device_is_at_work_is_in_the_next_step() -> None:
    engine = UnhurriedEngine()
    engine.steps.release()
    driver = EngineDriver(engine)
    await driver.start()
    async with asyncio.timeout(WAIT_S / 2):
        first = collect(driver, Request("a", (1,), SamplingParams(max_tokens=1)))
        second = collect(driver, Request("b", (1,), SamplingParams(max_tokens=1)))
        assert [len(outputs) for outputs in await asyncio.gather(first, second)] == [1, 1]
    await driver.stop()


async def until(holds: Callable[..., bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(0.001)


@asynccontextmanager
async def running(
    patience_s: float, max_tokens: int = 90
) -> AsyncIterator[tuple[ScriptedEngine, EngineDriver, list[int]]]:
    """Runs an engine with one request; gives the offsets of the outputs that came."""
    engine = ScriptedEngine()
    driver = EngineDriver(engine)
    driver.set_patience(patience_s)
    await driver.start()
    offsets: list[int] = []
    request = Request("a", (1,), SamplingParams(max_tokens=max_tokens))
    driver.submit(request, lambda output: offsets.append(output.offset))
    yield engine, driver, offsets
    engine.steps.release(max_tokens)
    await driver.stop()


async def test_with_patience_only_first_and_last_outputs_come_at_once() -> None:
    async with running(60.0, max_tokens=7) as (engine, driver, offsets):
        engine.steps.release(6)
        await until(lambda: bool(offsets))
        await asyncio.sleep(0.1)
        assert offsets == [0]
        engine.steps.release(1)
        await until(lambda: not driver.is_active("a"))
        assert offsets == list(range(7))


async def test_patience_ends_by_itself() -> None:
    async with running(1.0) as (engine, _, offsets):
        engine.steps.release(3)
        await until(lambda: bool(offsets))
        await asyncio.sleep(1.1)
        engine.steps.release(1)
        await until(lambda: len(offsets) == 4)


@pytest.mark.parametrize(("step_s", "sent_at_step"), [(0.02, 11), (0.05, 5), (0.1, 3), (0.15, 2), (0.5, 2)])
async def test_nothing_is_held_while_a_step_runs_that_ends_after_patience(
    step_s: float, sent_at_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patience is 0.21 s from the first step on; each step takes the same time."""
    now_s = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep)
    monkeypatch.setattr(driver_module, "time", clock)
    async with running(0.21) as (engine, _, offsets):
        engine.steps.release(1)
        await until(lambda: offsets == [0])
        for step in range(2, sent_at_step + 1):
            await until(lambda begun=step: engine.num_begun == begun)  # what is before it has been passed on, or not
            await asyncio.sleep(0)
            assert offsets == [0]
            now_s += step_s
            engine.steps.release(1)
        await until(lambda: offsets == list(range(sent_at_step)))


async def test_capacity_is_reported_when_the_last_waiting_request_has_started() -> None:
    async with running(60.0) as (engine, driver, offsets):
        told: list[int] = []
        driver.watch_capacity(lambda: told.append(driver.spare))
        engine.num_waiting = 1
        engine.steps.release(1)
        await until(lambda: offsets == [0])
        assert driver.spare == 0
        assert told == []
        engine.num_waiting = 0
        engine.steps.release(2)
        await until(lambda: told == [engine.max_num_seqs - 1])
        assert offsets == [0]
    assert len(told) == 1


async def test_behind_one_that_waits_for_pages_others_are_tried_one_by_one() -> None:
    async with running(60.0) as (engine, driver, offsets):
        told: list[int] = []
        driver.watch_capacity(lambda: told.append(driver.spare))
        engine.num_waiting, engine.num_free_pages = 2, 5
        engine.steps.release(1)
        await until(lambda: offsets == [0])
        assert driver.spare == 0  # the request that was tried waits too
        engine.num_waiting = 1
        engine.steps.release(1)
        await until(lambda: told == [1])
        engine.num_waiting, engine.num_free_pages = 0, 0
        engine.steps.release(1)
        await until(lambda: told == [1, engine.max_num_seqs - 1])


async def test_what_waits_is_handed_over_when_asked_for() -> None:
    async with running(60.0) as (engine, driver, offsets):
        engine.steps.release(5)
        await until(lambda: bool(offsets))
        await asyncio.sleep(0.1)
        assert offsets == [0]
        engine.steps.release(1)  # the step that is under way
        await driver.hand_over()
        assert offsets == list(range(len(offsets)))
        assert len(offsets) >= 5
    await driver.hand_over()  # nothing to wait for

"""The driver: an engine on its own thread, for an event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest
from engines import drive

from engine import Engine, EngineDriver, InvalidRequest, Output, Request, SamplingParams
from engine.driver import DriverStopped, EngineStats
from engine.request import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


async def collect(driver: EngineDriver, request: Request) -> list[int]:
    return [token async for output in driver.generate(request) for token in output.token_ids]


async def test_concurrent_requests_stream_what_the_bare_engine_gives(engine: Engine) -> None:
    requests = [Request(f"r{i}", tuple(range(i + 1, i + 9)), GREEDY) for i in range(6)]
    expected = [drive(engine, [request])[request.id, 0].token_ids for request in requests]
    driver = EngineDriver(engine)
    await driver.start()
    assert await asyncio.gather(*(collect(driver, request) for request in requests)) == expected
    assert driver.spare == engine.max_num_seqs
    await driver.stop()


async def test_closing_the_iterator_early_frees_what_the_request_holds(engine: Engine) -> None:
    driver = EngineDriver(engine)
    await driver.start()
    stream = driver.generate(Request("r", (1, 2, 3), SamplingParams(max_tokens=90, ignore_eos=True)))
    await anext(stream)
    await stream.aclose()
    async with asyncio.timeout(20):
        while driver.is_active("r"):
            await collect(driver, Request("other", (4,), GREEDY))
    assert engine._pool.num_available == engine._pool.num_pages - 1
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

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self.threads.add(threading.get_ident())

    def abort(self, request_id: str, reason: FinishReason) -> None:
        raise AssertionError("nobody aborts here")

    def step(self) -> list[Output]:
        raise RuntimeError("the device is gone")

    def has_work(self) -> bool:
        return bool(self.requests)

    def stats(self) -> EngineStats:
        return EngineStats()


async def test_what_ends_the_thread_reaches_whoever_waits() -> None:
    broken = BrokenEngine()
    driver = EngineDriver(broken)
    await driver.start()
    with pytest.raises(DriverStopped):
        await collect(driver, Request("r", (1,), GREEDY))
    with pytest.raises(RuntimeError, match="the device is gone"):
        await driver.wait_ended()
    with pytest.raises(DriverStopped):
        driver.submit(Request("r2", (1,), GREEDY), lambda output: None)
    assert broken.threads == {next(iter(broken.threads))} != {threading.get_ident()}
    await driver.stop()

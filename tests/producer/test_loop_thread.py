"""An event loop in a thread: any thread may call, nothing hangs at the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.producer.blocking.loop_thread import LoopThread

PATIENCE_S = 60


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test-loop")
    yield loop
    loop.stop()


async def name_of_thread() -> str:
    return threading.current_thread().name


async def fail() -> None:
    raise LookupError("nobody")


def test_calls_run_in_its_own_thread_and_bring_results_and_errors(loop: LoopThread) -> None:
    assert loop.call(name_of_thread()) == "test-loop"
    with pytest.raises(LookupError, match="nobody"):
        loop.call(fail())


def test_many_threads_wait_at_once(loop: LoopThread) -> None:
    everybody_is_here = asyncio.Barrier(10)

    async def meet(number: int) -> int:
        await everybody_is_here.wait()
        return number

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(lambda number: loop.call(meet(number)), range(10))) == list(range(10))


def test_a_call_from_its_own_thread_is_refused_instead_of_waiting_for_itself(loop: LoopThread) -> None:
    async def call_again() -> None:
        loop.call(name_of_thread())

    with pytest.raises(RuntimeError, match="can't end"):
        loop.call(call_again())


def test_stopping_cancels_what_runs_and_refuses_what_comes(loop: LoopThread) -> None:
    started = threading.Event()

    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(loop.call, endless())
        assert started.wait(PATIENCE_S)
        loop.stop()
        assert waiting.exception(PATIENCE_S) is not None
    with pytest.raises(RuntimeError, match="the client is closed"):
        loop.call(name_of_thread())
    loop.post(name_of_thread)  # a finalizer that comes late
    loop.stop()


def test_what_is_posted_runs_without_anybody_waiting(loop: LoopThread) -> None:
    ran = threading.Event()

    async def note() -> None:
        ran.set()

    loop.post(note)
    assert ran.wait(PATIENCE_S)

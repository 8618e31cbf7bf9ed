"""Additions to asyncio: a signal, a pause that an event ends, one task that many share."""

from __future__ import annotations

import asyncio

import pytest

from penstock.worker.tasks import Shared, Signal, pause


async def test_a_pause_ends_with_its_event() -> None:
    end = asyncio.Event()
    pausing = asyncio.create_task(pause(end, 10**6))
    await asyncio.sleep(0)
    assert not pausing.done()
    end.set()
    await pausing


@pytest.mark.parametrize("timeout_s", [0.0, 0.001])
async def test_a_pause_ends_by_itself(timeout_s: float) -> None:
    end = asyncio.Event()
    await pause(end, timeout_s)
    assert not end.is_set()


async def test_a_pause_can_be_cancelled() -> None:
    pausing = asyncio.create_task(pause(asyncio.Event(), 10**6))
    await asyncio.sleep(0)
    pausing.cancel()
    await asyncio.wait({pausing})
    assert pausing.cancelled()


def test_a_signal_that_nobody_waits_for_is_lost_on_nobody() -> None:
    Signal().fire()


async def test_a_waiter_that_gave_up_does_not_keep_others_from_waking() -> None:
    signal = Signal()
    first, second = [asyncio.ensure_future(signal.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    first.cancel()
    signal.fire()
    await second


async def test_signal_wakes_all_who_wait_and_none_later() -> None:
    signal = Signal()
    waiters = [asyncio.ensure_future(signal.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    signal.fire()
    await asyncio.gather(*waiters)
    late = asyncio.ensure_future(signal.wait())
    await asyncio.sleep(0)
    assert not late.done()
    late.cancel()


async def test_what_is_shared_runs_once_at_a_time() -> None:
    may_end = asyncio.Event()
    num_runs = 0

    async def work() -> int:
        nonlocal num_runs
        num_runs += 1
        await may_end.wait()
        return num_runs

    shared = Shared(work)
    first, *others = [asyncio.create_task(shared()) for _ in range(5)]
    await asyncio.sleep(0)
    first.cancel()  # whose call started it
    await asyncio.wait({first})
    may_end.set()
    assert await asyncio.gather(*others) == [1] * 4
    assert await shared() == 2  # nobody gets an outcome from before they asked
    may_end.clear()
    last = asyncio.create_task(shared())
    await asyncio.sleep(0)
    await shared.stop()
    await asyncio.wait({last})
    assert last.cancelled()


async def test_what_fails_fails_for_all_who_share_it_and_can_be_tried_again() -> None:
    errors = [LookupError("once")]

    async def work() -> str:
        await asyncio.sleep(0)
        if errors:
            raise errors.pop()
        return "done"

    shared = Shared(work)
    outcomes = await asyncio.gather(shared(), shared(), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["once", "once"]
    assert await shared() == "done"


async def test_what_never_ran_can_be_stopped() -> None:
    async def work() -> None:
        raise AssertionError("nobody asked")

    await Shared(work).stop()

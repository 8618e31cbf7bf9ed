"""Additions to asyncio: a signal, and a pause that an event ends."""

from __future__ import annotations

import asyncio

import pytest

from penstock.worker.tasks import Signal, pause


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

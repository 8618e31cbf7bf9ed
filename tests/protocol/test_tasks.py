"""Tasks that are sure to end, and one task for many waiters."""

from __future__ import annotations

import asyncio

from penstock.protocol.tasks import Joined, end_tasks


async def test_tasks_are_ended_even_if_a_library_swallows_the_first_cancellation() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end_tasks([task], patience_s=0.001)
    assert task.cancelled()
    assert swallowed == 3


async def test_an_error_of_a_task_that_is_ended_is_nobody_s() -> None:
    async def fails_at_the_end() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            raise OSError("on the way out")

    failed, ended = asyncio.create_task(fails_at_the_end()), asyncio.create_task(asyncio.sleep(0))
    await ended
    await end_tasks(iter([failed, ended]))
    assert isinstance(failed.exception(), OSError)
    assert not ended.cancelled()


async def test_no_tasks_are_ended_at_once() -> None:
    await end_tasks([])


async def test_who_asks_for_joined_work_gets_what_runs_even_if_the_first_one_is_cancelled() -> None:
    go_on, num_runs = asyncio.Event(), 0

    async def work() -> int:
        nonlocal num_runs
        num_runs += 1
        await go_on.wait()
        return num_runs

    joined = Joined(work)
    first, second = asyncio.create_task(joined.run()), asyncio.create_task(joined.run())
    await asyncio.sleep(0)
    await end_tasks([first])
    go_on.set()
    assert first.cancelled()
    assert await second == 1
    assert await joined.run() == 2

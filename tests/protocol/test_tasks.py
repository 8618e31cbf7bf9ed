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


async def test_joined_work_runs_once_at_a_time() -> None:
    may_end = asyncio.Event()
    num_runs = 0

    async def work() -> int:
        nonlocal num_runs
        num_runs += 1
        await may_end.wait()
        return num_runs

    joined = Joined(work)
    first, *others = [asyncio.create_task(joined.run()) for _ in range(5)]
    await asyncio.sleep(0)
    first.cancel()  # whose call started it
    await asyncio.wait({first})
    assert first.cancelled()
    may_end.set()
    assert await asyncio.gather(*others) == [1] * 4
    assert await joined.run() == 2  # nobody gets an outcome from before they asked
    may_end.clear()
    last = asyncio.create_task(joined.run())
    await asyncio.sleep(0)
    await joined.close()
    await asyncio.wait({last})
    assert last.cancelled()


async def test_what_fails_fails_for_all_who_joined_it_and_can_be_tried_again() -> None:
    errors = [LookupError("once")]

    async def work() -> str:
        await asyncio.sleep(0)
        if errors:
            raise errors.pop()
        return "done"

    joined = Joined(work)
    outcomes = await asyncio.gather(joined.run(), joined.run(), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["once", "once"]
    assert await joined.run() == "done"


async def test_what_never_ran_can_be_stopped() -> None:
    async def work() -> None:
        raise AssertionError("nobody asked")

    await Joined(work).close()


async def test_work_that_has_ended_is_not_joined_even_before_anybody_was_told() -> None:
    late: list[asyncio.Task[None]] = []
    num_runs = 0

    async def work() -> int:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 1:
            late.append(asyncio.create_task(ask_until_new()))  # it runs once this has ended, before any callback
        return num_runs

    async def ask_until_new() -> None:
        assert not joined.is_running
        while await joined.run() < 2:
            pass

    joined = Joined(work)
    assert await joined.run() == 1
    await late[0]

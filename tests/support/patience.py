"""Time limits of tests, and marks for cases that only slow runs include: the one place to change for a busy machine.

No test passes because of these figures. They only say when a wait is given up, so they are generous, and the limit per
test leaves time for a few waits. `TEST_PATIENCE=3` makes all of them three times as long.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
WAIT_S = 240.0 * PATIENCE  # for one event, a reply, the end of a process
TEST_S = 900.0 * PATIENCE  # for a whole test, its fixtures included


async def eventually(condition: Callable[..., Any], *, timeout_s: float = WAIT_S) -> None:
    """Waits until `condition()`, awaited if need be, is true; fails when that takes too long."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            while True:
                held = condition()
                if isinstance(held, Awaitable):
                    held = await held
                if held:
                    return
                await asyncio.sleep(0.005)
    except TimeoutError:
        if not limit.expired():  # it was the condition's own
            raise
        raise AssertionError(f"not so within {timeout_s:g} s") from None


def slow(*values: Any) -> Any:
    """Marks a case of a parametrised test that `make test` leaves to `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def mostly_slow(cases: dict[str, Any], *quick: str) -> list[Any]:
    """Makes cases by name; only those named as `quick` run in `make test`."""
    assert cases.keys() >= set(quick)
    return [
        pytest.param(case, id=name, marks=[] if name in quick else pytest.mark.slow) for name, case in cases.items()
    ]


def pairs(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """Makes cases of each row with each column. `make test` runs as many as show every row and every column once.

    A row or column of several values is a tuple.
    """
    rows, columns = ([each if isinstance(each, tuple) else (each,) for each in of] for of in (rows, columns))
    quick = {(i % len(rows), i % len(columns)) for i in range(max(len(rows), len(columns)))}
    return [
        pytest.param(*row, *column, marks=[] if (i, j) in quick else pytest.mark.slow)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]

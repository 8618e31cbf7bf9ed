"""Requests are sent when they are due."""

from __future__ import annotations

import asyncio
import select
import sys
from types import SimpleNamespace

import pytest

from penstock.tools.bench.traffic import punctual


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' loops are punctual")
def test_waits_are_not_rounded_to_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: list[float] = []

    def wait(readable: list[int], writable: list[int], exceptional: list[int], timeout_s: float) -> object:
        waits_s.append(timeout_s)
        return select.select(readable, writable, exceptional, timeout_s)

    async def main() -> tuple[float, str]:
        await asyncio.sleep(0.0105)
        longest_s = max(waits_s)  # the loop's end may wait for the thread, with a limit of minutes
        return longest_s, await asyncio.to_thread(lambda: "woken by a thread")

    monkeypatch.setattr(punctual, "select", SimpleNamespace(select=wait))
    longest_s, said = punctual.run(main())
    assert said == "woken by a thread"
    assert 0.010 < longest_s <= 0.0105

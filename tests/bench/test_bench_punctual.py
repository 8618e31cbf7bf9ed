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

    async def main() -> str:
        await asyncio.sleep(0.0105)
        return await asyncio.to_thread(lambda: "woken by a thread")

    monkeypatch.setattr(punctual, "select", SimpleNamespace(select=wait))
    assert punctual.run(main()) == "woken by a thread"
    assert 0.010 < max(waits_s) <= 0.0105

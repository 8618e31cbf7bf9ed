"""Clients and clocks for tests of delivery."""

from __future__ import annotations

import pytest

from penstock.protocol.redis.connection import RedisClient, ensure_group
from penstock.worker.run import requests
from tests.worker.delivery.delivery_lab import NOW_S, FixedClock


@pytest.fixture
async def raw(raw: RedisClient) -> RedisClient:
    """A client, and a queue that has its group."""
    await ensure_group(raw, "q")
    return raw


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FixedClock:
    """Clock that requests look at."""
    fixed = FixedClock(NOW_S)
    monkeypatch.setattr(requests, "time", fixed)
    return fixed

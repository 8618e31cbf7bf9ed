"""Clients and clocks for tests of delivery."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from delivery_lab import NOW_S, FixedClock

from penstock.producer.redis.connection import RedisClient, connect, ensure_group
from penstock.worker.delivery import requests


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[RedisClient]:
    """A client whose answers are bytes, as the worker's are, and a queue that has its group."""
    client = connect(redis_url, decode=False)
    await ensure_group(client, "q")
    yield client
    await client.aclose()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FixedClock:
    """The clock that requests look at."""
    fixed = FixedClock(NOW_S)
    monkeypatch.setattr(requests, "time", fixed)
    return fixed

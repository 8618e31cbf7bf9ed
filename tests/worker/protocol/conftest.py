"""A queue that has its group, for tests of single scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from script_calls import STREAM

from penstock.producer import keys
from penstock.producer.redis.connection import RedisClient, connect


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[RedisClient]:
    """A client whose answers are bytes, as the worker's are."""
    client = connect(redis_url, decode=False)
    await client.xgroup_create(STREAM, keys.GROUP, id="0", mkstream=True)
    yield client
    await client.aclose()

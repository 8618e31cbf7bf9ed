"""A queue with its group, for tests of single scripts."""

from __future__ import annotations

import pytest
from script_calls import STREAM

from penstock.producer import keys
from penstock.producer.redis.connection import RedisClient


@pytest.fixture
async def group(raw: RedisClient) -> None:
    await raw.xgroup_create(STREAM, keys.GROUP, id="0", mkstream=True)

"""A queue with its group, for tests of single scripts."""

from __future__ import annotations

import pytest
from script_calls import STREAM

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient


@pytest.fixture
async def group(raw: RedisClient) -> None:
    await raw.xgroup_create(STREAM, keys.GROUP, id="0", mkstream=True)

"""A queue with its group, for tests of single scripts."""

from __future__ import annotations

import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.protocol.scripts.script_calls import STREAM


@pytest.fixture
async def group(raw: RedisClient) -> None:
    await raw.xgroup_create(STREAM, keys.GROUP, id="0", mkstream=True)

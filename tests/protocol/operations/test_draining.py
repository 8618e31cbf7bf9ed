"""A worker is told to drain by name, and only the process that has the name now obeys."""

from __future__ import annotations

import pytest

from penstock.protocol import keys
from penstock.protocol.operations.draining import UnknownWorker, tell_to_drain
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import eventually
from tests.support.programs.worker_harness import running_worker

pytestmark = pytest.mark.every_server


async def test_a_mark_is_for_one_process_and_not_for_the_next_of_its_name(redis_url: str, raw: RedisClient) -> None:
    with pytest.raises(UnknownWorker, match="no live worker 'w'"):
        await tell_to_drain(raw, "q", "w")
    await raw.set(keys.drain("q", "w"), "an earlier process")
    async with running_worker(redis_url, name="w", heartbeat_ttl_s=0.6) as worker:
        await eventually(lambda: _has_left(raw, 1, 550))
        await eventually(lambda: _has_left(raw, 551, 600))  # so it has beaten since
        assert worker.service.readiness.is_ready
        assert await raw.get(keys.drain("q", "w")) == b"an earlier process"


async def _has_left(raw: RedisClient, least_ms: int, most_ms: int) -> bool:
    return least_ms <= int(await raw.pttl(keys.heartbeat("q", "w"))) <= most_ms

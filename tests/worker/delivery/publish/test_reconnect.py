"""The publisher on a new connection, which may lead to a server that has forgotten something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from redis import exceptions
from redis.asyncio import Redis

from penstock.engine.request import Output
from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.protocol.redis.pipeline import execute
from penstock.protocol.scripts import Bill, Claim, ClaimState
from penstock.protocol.tasks import end_tasks
from penstock.protocol.wire import GenerateRequest
from penstock.serving.readiness import Readiness
from penstock.worker.config import WorkerConfig
from penstock.worker.metrics import WorkerMetrics
from penstock.worker.publish import reconnect
from penstock.worker.publish.coalescing import Coalescing
from penstock.worker.publish.outbox import Drop, Fence, Outbox
from penstock.worker.publish.publisher import Publisher
from penstock.worker.run.entries import QueueEntry
from penstock.worker.run.requests import LiveRequest, RequestTable
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import ranked
from tests.support.redis_servers.streams import add_entry, read_raw_stream
from tests.support.watched import watched

pytestmark = pytest.mark.every_server


@asynccontextmanager
async def publishing(url: str) -> AsyncIterator[tuple[Publisher, Outbox, LiveRequest, RedisClient]]:
    """A publisher and a request of epoch 1 with two chunks on its reply."""
    redis = connect(url, decode=False, retries=0)
    requests = RequestTable(lambda _: None)
    config, at_once = WorkerConfig(queue="q", name="w"), Coalescing(0, 0, lambda _: None)
    outbox = Outbox(config, requests, at_once, has_nodes=False)
    publisher = Publisher(redis, outbox, at_once, WorkerMetrics(), Readiness())
    task = asyncio.create_task(publisher.run(), name="publisher")
    answer = await redis.execute_command(
        *scripts.claim("q", "r", entry_id="1-1", worker="w", instance="i", ttl_ms=10**6)
    )
    claim = scripts.parse_claim(answer, "i")
    assert isinstance(claim, Claim)
    entry, asked = QueueEntry("1-1", {}, 0), GenerateRequest(prompt="x")
    live = LiveRequest("q", "r", entry, claim, time.monotonic(), asked, structlog.get_logger())
    requests.add(live)
    async with watched(task), asyncio.timeout(WAIT_S):
        for at in range(2):
            outbox.push(live, Output("r", 0, at, (at,), "a"))
            await publisher.wait_idle()
        assert live.reply.last_number == 2
        requests.must_recover = False
        yield publisher, outbox, live, redis
    await end_tasks([task])
    await redis.aclose()


async def connect_anew(redis: RedisClient) -> None:
    """Makes the next command open a new connection, which no caller notices."""
    assert isinstance(redis, Redis)
    await redis.connection_pool.disconnect()


async def test_a_reply_that_lost_entries_is_let_go_of(redis_url: str, redis: RedisClient) -> None:
    async with publishing(redis_url) as (publisher, outbox, live, worker_redis):
        await redis.xdel(keys.reply("q", "r"), f"{live.claim.epoch}-2")
        await connect_anew(worker_redis)
        outbox.push(live, Output("r", 0, 2, (2,), "a"))
        await publisher.wait_idle()
        assert live.is_gone
        assert outbox.requests.must_recover
    assert ranked(entry_id for entry_id, _ in await read_raw_stream(redis, keys.reply("q", "r"))) == ["1-0", "1-1"]


async def test_a_reply_that_is_whole_goes_on(redis_url: str, redis: RedisClient) -> None:
    async with publishing(redis_url) as (publisher, outbox, live, worker_redis):
        await connect_anew(worker_redis)
        outbox.push(live, Output("r", 0, 2, (2,), "a"))
        await publisher.wait_idle()
        assert not live.is_gone
        assert outbox.requests.must_recover  # entries may be pending that this worker knows nothing of
    ids = [entry_id for entry_id, _ in await read_raw_stream(redis, keys.reply("q", "r"))]
    assert ranked(ids) == ["1-0", "1-1", "1-2", "1-3"]


async def test_an_acknowledgement_is_for_the_server_that_has_the_end(redis_url: str, redis: RedisClient) -> None:
    """The next server may not know the end, and the entry is then all that is left of the request."""
    entry_id = await add_entry(redis, keys.requests("q"), {"prompt": "x"})
    await redis.xgroup_create(keys.requests("q"), keys.GROUP, id="0")
    await redis.xreadgroup(keys.GROUP, "w", {keys.requests("q"): ">"})
    async with publishing(redis_url) as (publisher, outbox, _, worker_redis):
        await connect_anew(worker_redis)
        outbox.remove(Bill(entry_id, "", None))
        await publisher.wait_idle()
        assert await redis.xlen(keys.requests("q")) == 1
        assert outbox.requests.must_recover  # so the intake finds it, and the claim tells whether it has ended
        outbox.remove(Bill(entry_id, "", None))
        await eventually(lambda: _is_gone(redis))


async def _is_gone(redis: RedisClient) -> bool:
    return not await redis.xlen(keys.requests("q"))


VERDICTS: dict[str, Any] = {
    "kept": lambda _: None,
    "fenced": Fence,
    "gone": lambda live: Drop(live, "gone"),
    "rolled_back": lambda live: Drop(live, "rolled_back"),
}


@pytest.mark.parametrize(
    ("owner", "last", "verdict"),
    [
        (("3", "i"), "3-2", "kept"),
        (("3", "i"), "3-3", "kept"),
        (("3", "i"), "3-1", "rolled_back"),
        (("3", "i"), "2-9", "rolled_back"),
        (("3", "i"), "4-0", "fenced"),
        (("3", "i"), None, "gone"),
        (("4", "j"), "4-0", "fenced"),
        (("2", "j"), "2-9", "fenced"),  # a claim that was made after this one was lost, by a clock that is behind
        (("3", "j"), "3-2", "fenced"),
        (None, "3-2", "rolled_back"),
        (None, None, "gone"),
    ],
)
def test_verdicts(owner: tuple[str, str] | None, last: str | None, verdict: str) -> None:
    """The request is of epoch 3, and its chunk 2 was confirmed; chunk 3 may have been written without an answer."""
    claim = Claim(3, "i", False, False, 0, 0, 1, 0, 0, 0)
    live: Any = SimpleNamespace(claim=claim, reply=SimpleNamespace(last_number=2))
    assert reconnect.judge(live, ClaimState(owner, last)) == VERDICTS[verdict](live)


async def test_what_a_cluster_client_connects_to_look_at_the_topology_waits_for_nothing(redis_cluster_url: str) -> None:
    """All commands of the client wait for that look, those of a look back among them."""
    num_looks = 0
    async with aclosing(connect(redis_cluster_url, decode=False, retries=0)) as redis:
        reconnects = reconnect.Reconnects(redis, lambda: None)

        async def look() -> None:
            nonlocal num_looks
            num_looks += 1
            await execute(redis, [("GET", "k")])

        async with asyncio.timeout(WAIT_S):
            with reconnects.looking(look), pytest.raises((exceptions.RedisError, exceptions.RedisClusterException)):
                await execute(redis, [("GET", "k")])
            assert num_looks == 0
            await reconnects.prepare()
            with reconnects.looking(look):
                for key in ("a", "b", "c", "k"):  # of all nodes
                    assert await execute(redis, [("GET", key)]) == [None]
    assert num_looks

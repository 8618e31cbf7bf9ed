"""While its model is loaded, a worker's name is reserved, and what a dead process of that name left is not held up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from redis import exceptions

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ModelCard
from penstock.serving.readiness import Readiness
from penstock.worker.config import WorkerConfig
from penstock.worker.errors import NameTaken
from penstock.worker.metrics import WorkerMetrics
from penstock.worker.presence import reservation as reservations
from penstock.worker.presence.heartbeat import Heartbeat, Reclaimer
from penstock.worker.presence.reservation import Reservation
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import QUICK

KEY = keys.starting("q", "w")
LONG_S = 1000.0

Make = Callable[..., Reservation]


@pytest.fixture
def make(raw: RedisClient) -> Make:
    return lambda ttl_s=LONG_S: Reservation(raw, config(ttl_s), Readiness())


def config(ttl_s: float) -> WorkerConfig:
    return WorkerConfig(**{**QUICK, "name": "w", "heartbeat_ttl_s": ttl_s})


async def taken(reservation: Reservation) -> Reservation:
    await asyncio.wait_for(reservation.take(asyncio.Event()), WAIT_S)
    return reservation


async def test_a_name_is_taken_renewed_and_let_go(raw: RedisClient, make: Make) -> None:
    reservation = await taken(make())
    assert not await raw.exists(keys.heartbeat("q", "w"))
    await raw.pexpire(KEY, 5000)
    await taken(reservation)
    assert 500_000 < await raw.pttl(KEY) <= LONG_S * 1000
    await reservation.release()
    assert not await raw.exists(KEY)
    await taken(make())


async def test_a_live_process_of_the_name_is_told_from_a_dead_one(raw: RedisClient, make: Make) -> None:
    first = await taken(make(ttl_s=0.6))
    holding = asyncio.create_task(first.hold())
    with pytest.raises(NameTaken, match="another process uses the name 'w' in queue 'q'"):
        await taken(make(ttl_s=0.6))
    holding.cancel()
    await taken(make(ttl_s=0.6))  # once it has lapsed


async def test_a_serving_worker_has_the_name(raw: RedisClient, make: Make) -> None:
    heartbeat = Heartbeat(raw, config(0.6), "serving", Readiness(), ModelCard(model="m", worker="w", version="1"))
    await heartbeat.start(asyncio.Event())
    beating = asyncio.create_task(heartbeat.run())
    with pytest.raises(NameTaken):
        await taken(make(ttl_s=0.6))
    assert not await raw.exists(KEY)
    beating.cancel()


async def test_whoever_lost_the_name_while_loading_is_told(raw: RedisClient, make: Make) -> None:
    holding = asyncio.create_task((await taken(make(ttl_s=0.3))).hold())
    await raw.set(KEY, "other", px=10_000)
    await eventually(lambda: _renewed(raw, holding))
    with pytest.raises(NameTaken):
        await holding


async def _renewed(raw: RedisClient, holding: asyncio.Task[None]) -> bool:
    await raw.set(KEY, "other", px=10_000)
    return holding.done()


async def test_letting_go_leaves_another_s_reservation(raw: RedisClient, make: Make) -> None:
    reservation = await taken(make())
    await raw.set(KEY, "other")
    await reservation.release()
    assert await raw.get(KEY) == b"other"


async def test_stop_ends_the_wait_for_a_dead_process(raw: RedisClient, make: Make) -> None:
    await raw.set(KEY, "dead", px=10**6)
    stop = asyncio.Event()
    waiting = asyncio.create_task(make().take(stop))
    stop.set()
    await asyncio.wait_for(waiting, WAIT_S)
    assert await raw.get(KEY) == b"dead"


async def test_a_dead_worker_s_entries_are_freed_while_its_successor_loads(raw: RedisClient, make: Make) -> None:
    """A heartbeat at this time would keep them until the model is there."""
    await raw.xadd(keys.requests("q"), {"prompt": "x"})
    await raw.xgroup_create(keys.requests("q"), keys.GROUP, id="0")
    await raw.xreadgroup(keys.GROUP, "w", {keys.requests("q"): ">"})
    await taken(make())
    other = WorkerConfig(**{**QUICK, "name": "other"})
    await Reclaimer(raw, other, WorkerMetrics(), Readiness()).scan()
    (pending,) = await raw.xpending_range(keys.requests("q"), keys.GROUP, "-", "+", 10)
    assert pending["consumer"] == keys.WAITING.encode()


async def test_what_it_lost_while_loading_does_not_outlast_it(
    raw: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session's own parts say whether Redis is there."""
    readiness = Readiness()
    reservation = await taken(Reservation(raw, config(LONG_S), readiness))
    readiness.lost_redis("name", exceptions.ConnectionError("gone"))

    async def fail(*_: object) -> None:
        raise exceptions.ConnectionError("gone")

    monkeypatch.setattr(reservations, "execute_one", fail)
    with pytest.raises(exceptions.ConnectionError):
        await reservation.release()
    assert readiness.is_ready

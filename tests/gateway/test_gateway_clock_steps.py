"""Gateways keep deadlines by the server's clock while it is set back and forward."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from penstock.gateway.abandonment.readers import AbandonmentWatch
from penstock.gateway.batches.leases import BatchLease, Leases
from penstock.gateway.keys.limits import Limiter, OverLimit
from penstock.gateway.keys.published import Published
from penstock.gateway.keys.records import KeyLimits
from penstock.gateway.keys.settling import Settling
from penstock.gateway.keys.tabs import Order, Tab, TabStore
from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.producer import AsyncClient, Handle
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect
from tests.support.patience import eventually
from tests.support.programs.gateway_harness import standing_with
from tests.support.redis_servers.clocks import ShiftedServer
from tests.support.redis_servers.streams import read_scores

FAR_S = 100_000.0  # no test waits for so long


@pytest.fixture
async def redis(shifted: ShiftedServer) -> AsyncIterator[RedisClient]:
    client = connect(shifted.url, decode=True)
    yield client
    await client.aclose()


@pytest.fixture
async def store(shifted: ShiftedServer) -> AsyncIterator[Store]:
    async with Store(shifted.url) as store:
        yield store


async def none_ended(_: str) -> bool:
    return False


async def nothing_known(_: str, __: str) -> Published:
    return Published("waiting", 0)


async def test_what_nobody_reads_is_abandoned_in_time_and_what_somebody_reads_never(
    shifted: ShiftedServer, redis: RedisClient, store: Store
) -> None:
    async def is_cancelled(handle: Handle) -> bool:
        return bool(await redis.exists(keys.cancel("default", handle.id)))

    async def is_swept_anew() -> bool:
        """Checks that a sweep has begun by the present clock."""
        server_s, _ = await redis.time()
        return abs(int(await redis.get(names.swept()) or 0) / 1000 - server_s) < 10

    async with AsyncClient(shifted.url) as client:
        left, read = [await client.submit("x") for _ in range(2)]
        async with AbandonmentWatch(store, client, standing_with(store), 1000.0) as killed:
            killed.reading("default", left.stream()).__enter__()
            await eventually(lambda: redis.zscore(names.readers(), f"default {left.id}"))
        async with AbandonmentWatch(store, client, standing_with(store), 0.6) as watch:
            with watch.reading("default", read.stream()):
                await eventually(lambda: redis.zscore(names.readers(), f"default {read.id}"))
                for ahead_s in (-90.0, -FAR_S, -2 * FAR_S):
                    shifted.set_ahead(ahead_s)
                    await eventually(is_swept_anew)
                assert not await is_cancelled(left)
                server_s, _ = await redis.time()
                left_s = (await read_scores(redis, names.readers()))[f"default {left.id}"] / 1000 - server_s
                assert 500 < left_s < 1500  # its gateway, with other settings, gave it 1,250
                shifted.set_ahead(1300 - 2 * FAR_S)
                await eventually(lambda: is_cancelled(left))
            assert not await is_cancelled(read)


async def test_the_lease_of_a_batch_lapses_in_time_whoever_held_it(shifted: ShiftedServer, store: Store) -> None:
    short, long = Leases(store, 10.0), Leases(store, 60.0)
    for batch in ("of_long", "of_short"):
        await short.offer(batch)
    [held_long] = await long.claim(1)
    [held_short] = await short.claim(1)
    shifted.set_ahead(-FAR_S)
    assert await short.claim(9) == []
    shifted.set_ahead(12 - FAR_S)
    assert [lease.batch_id for lease in await long.claim(9)] == [held_short.batch_id]
    shifted.set_ahead(58 - FAR_S)
    assert held_long.batch_id not in [lease.batch_id for lease in await short.claim(9)]
    shifted.set_ahead(62 - FAR_S)
    assert held_long.batch_id in [lease.batch_id for lease in await short.claim(9)]
    assert not await long.renew(held_long)


async def test_a_batch_s_holder_keeps_it_as_long_as_it_renews(shifted: ShiftedServer, store: Store) -> None:
    leases, other = Leases(store, 60.0), Leases(store, 10.0)
    await leases.offer("b")
    [lease] = await leases.claim(1)
    for ahead_s in (-90.0, -FAR_S, 50 - FAR_S, -2 * FAR_S):
        shifted.set_ahead(ahead_s)
        assert await other.claim(1) == []
        assert await leases.renew(lease)
    shifted.set_ahead(FAR_S)  # it lapsed before its time, and is fenced off
    [taken] = await other.claim(1)
    assert taken == BatchLease("b", lease.token + 1)
    assert not await leases.renew(lease)


@pytest.mark.parametrize("limits", [KeyLimits(requests_per_minute=2), KeyLimits(tokens_per_minute=20)])
async def test_a_minute_s_limit_holds_and_ends_after_a_step_back(
    shifted: ShiftedServer, store: Store, limits: KeyLimits
) -> None:
    limiter = Limiter(store.execute, none_ended, standing_with(store))
    settling = Settling(store.execute, nothing_known, standing_with(store))

    async def use() -> None:
        if limits.requests_per_minute:
            await limiter.release(await limiter.admit("k", limits))
        else:
            order = Order(Tab("k", "default", secrets.token_hex(8)), 1, 10, 10)
            await settling.reserve("k", limits, [order])

    await use()
    await use()
    shifted.set_ahead(-FAR_S)
    with pytest.raises(OverLimit) as refused:
        await use()
    assert refused.value.retry_after_s is not None
    assert 1 <= refused.value.retry_after_s <= 61
    shifted.set_ahead(62 - FAR_S)
    await use()


async def test_the_place_of_a_killed_gateway_s_request_is_free_in_time(shifted: ShiftedServer, store: Store) -> None:
    killed, limiter = (Limiter(store.execute, none_ended, standing_with(store)) for _ in range(2))
    limits = KeyLimits(max_concurrent=1)
    await killed.admit("k", limits)
    shifted.set_ahead(-FAR_S)
    with pytest.raises(OverLimit):
        await limiter.admit("k", limits)
    shifted.set_ahead(16 - FAR_S)
    await limiter.admit("k", limits)


async def test_a_tab_that_nobody_reads_is_looked_at_in_time(shifted: ShiftedServer, store: Store) -> None:
    tabs, tab = TabStore(store.execute), Tab("k", "default", "r")
    await tabs.put_off(15.0, [tab])
    shifted.set_ahead(-FAR_S)
    assert await tabs.take_due(9, 10.0, 15.0) == []
    shifted.set_ahead(16 - FAR_S)
    assert await tabs.take_due(9, 10.0, 15.0) == [tab]
    assert await tabs.take_due(9, 10.0, 15.0) == []

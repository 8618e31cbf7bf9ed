"""The bound on what the gateway keeps, on real servers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.gateway.errors import ApiError
from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.gateway.store.ledger import OVERHEAD_BYTES, Ledger
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import eventually

pytestmark = pytest.mark.every_server


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    async with Store(redis_url) as store:
        yield store


def ledger_of(store: Store, *, num_things: int, size: int = 1000) -> Ledger:
    """Makes a ledger with capacity for `num_things` things of this size."""
    return Ledger(store, max_share=0.9, max_bytes=num_things * (size + OVERHEAD_BYTES))


async def total(redis: RedisClient) -> int:
    return int(await redis.hget(names.ledger_sizes(), "total") or 0)


async def test_what_is_over_the_limit_is_refused_with_its_numbers(store: Store) -> None:
    ledger = ledger_of(store, num_things=2)
    await ledger.charge("a", 1000, 60)
    await ledger.charge("b", 1000, 60)
    with pytest.raises(ApiError, match=r"keeps 3024 bytes in Redis and may keep 3024: 1 more do not fit") as caught:
        await ledger.charge("c", 1, 60)
    assert (caught.value.status, caught.value.code) == (507, "store_full")
    await ledger.release("a")
    await ledger.charge("c", 1, 60)


async def test_a_charge_that_is_repeated_counts_once(store: Store, redis: RedisClient) -> None:
    ledger = ledger_of(store, num_things=1)
    for _ in range(3):
        await ledger.charge("a", 1000, 60)
    assert await total(redis) == 1000 + OVERHEAD_BYTES
    for _ in range(2):
        await ledger.release("a")
    assert await total(redis) == 0


async def test_two_gateways_share_one_limit(store: Store, redis_url: str) -> None:
    async with Store(redis_url) as other:
        await ledger_of(store, num_things=1).charge("a", 1000, 60)
        with pytest.raises(ApiError):
            await ledger_of(other, num_things=1).charge("b", 1000, 60)


async def test_what_turned_out_larger_is_counted_although_it_is_too_much(store: Store, redis: RedisClient) -> None:
    ledger = ledger_of(store, num_things=1)
    await ledger.charge("a", 10, 60)
    await ledger.correct("a", 5000)
    assert await total(redis) == 5000 + OVERHEAD_BYTES
    with pytest.raises(ApiError):
        await ledger.charge("b", 1, 60)
    await ledger.charge("a", 100, 60)


async def test_what_was_removed_is_not_counted_again_by_whoever_learns_its_size_late(
    store: Store, redis: RedisClient
) -> None:
    ledger = ledger_of(store, num_things=1)
    await ledger.correct("a", 500)
    assert await total(redis) == 0


async def test_what_expired_is_no_longer_counted(store: Store, redis: RedisClient) -> None:
    ledger = ledger_of(store, num_things=1)
    await ledger.charge("a", 1000, 60)
    await redis.zadd(names.ledger_expiries(), {"a": 1})
    await ledger.charge("b", 1000, 60)
    assert await redis.hgetall(names.ledger_sizes()) == {"b": "1512", "total": "1512"}


async def test_the_ledger_lives_as_long_as_the_last_that_it_counts(store: Store, redis: RedisClient) -> None:
    ledger = ledger_of(store, num_things=3)
    await ledger.charge("a", 1, 1000)
    await ledger.charge("b", 1, 10)
    for key in (names.ledger_sizes(), names.ledger_expiries()):
        assert 990 < await redis.ttl(key) <= 1000
    await ledger.charge("c", 1, 1)
    await redis.delete(names.ledger_sizes(), names.ledger_expiries())
    await ledger.charge("d", 1, 1)
    await eventually(lambda: _is_gone(redis))


async def _is_gone(redis: RedisClient) -> bool:
    return not await redis.exists(names.ledger_sizes(), names.ledger_expiries())


async def test_the_limit_is_a_share_of_what_the_server_may_take(store: Store, redis: RedisClient) -> None:
    await redis.config_set("maxmemory", 100_000_000)
    try:
        assert await Ledger(store, max_share=0.25).limit() == 25_000_000
        assert await Ledger(store, max_share=0.25, max_bytes=1000).limit() == 1000
    finally:
        await redis.config_set("maxmemory", 0)
    machine = (await redis.info("memory"))["total_system_memory"]
    assert await Ledger(store, max_share=0.5).limit() == machine // 2


async def test_a_cluster_has_one_ledger(redis_cluster_url: str) -> None:
    async with Store(redis_cluster_url) as store:
        ledger = ledger_of(store, num_things=1)
        await ledger.charge("a", 1000, 60)
        with pytest.raises(ApiError):
            await ledger.charge("b", 1000, 60)
        assert await Ledger(store, max_share=0.5).limit() > 1000

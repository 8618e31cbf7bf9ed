"""Documents that clients may ask for later."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.gateway.errors import ApiError
from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.gateway.store.ledger import OVERHEAD_BYTES, Ledger
from penstock.gateway.store.records import Records
from penstock.protocol.redis.connection import RedisClient

pytestmark = pytest.mark.every_server


@pytest.fixture
async def records(redis_url: str) -> AsyncIterator[Records]:
    async with Store(redis_url) as store:
        yield Records(store, Ledger(store, max_share=0.9, max_bytes=3000))


async def counted(redis: RedisClient) -> int:
    return int(await redis.hget(names.ledger_sizes(), "total") or 0)


async def test_a_record_is_there_until_it_expires(records: Records, redis: RedisClient) -> None:
    made = await records.create("thing", "a", {"owner": "", "text": "ü"}, ttl_s=60)
    seconds, _ = await redis.time()
    assert abs(made.document["created_at"] - seconds) <= 1
    assert await records.read("thing", "a") == made
    assert 0 < await redis.ttl(names.record("thing", "a")) <= 60
    assert await records.read("other", "a") is None
    assert await records.read("thing", "b") is None


@pytest.mark.parametrize("there", ["ann", ""])
async def test_a_record_is_its_owner_s(records: Records, there: str) -> None:
    made = await records.create("thing", "a", {"owner": there}, ttl_s=60)
    assert await records.read_owned("thing", "a", there) == made
    assert await records.read_owned("thing", "a", "bob") is None


@pytest.mark.parametrize("wrong", ["", "a}", "a" * 129, "a\n", "a b"])
async def test_what_is_no_id_is_not_looked_for(records: Records, redis: RedisClient, wrong: str) -> None:
    await redis.set(names.record("thing", wrong), '{"owner":"ann"}')
    assert await records.read_owned("thing", wrong, "ann") is None


async def test_who_comes_second_gets_what_the_first_one_made(records: Records) -> None:
    first = await records.create("thing", "a", {"owner": "", "from": 1}, ttl_s=60)
    assert await records.create("thing", "a", {"owner": "", "from": 2}, ttl_s=60) == first


async def test_what_is_deleted_is_gone_and_free(records: Records, redis: RedisClient) -> None:
    await records.create("thing", "a", {}, ttl_s=60)
    assert await records.delete("thing", "a")
    assert not await records.delete("thing", "a")
    assert await records.read("thing", "a") is None
    assert await counted(redis) == 0


async def test_nothing_is_kept_that_is_too_much(records: Records) -> None:
    await records.create("thing", "a", {"text": "x" * 1500}, ttl_s=60)
    with pytest.raises(ApiError) as caught:
        await records.create("thing", "b", {"text": "x" * 1500}, ttl_s=60)
    assert caught.value.status == 507
    assert await records.read("thing", "b") is None


async def test_what_is_kept_elsewhere_counts_as_well(records: Records, redis: RedisClient) -> None:
    made = await records.create("thing", "a", {}, ttl_s=60, more_bytes=100)
    assert await counted(redis) == len("{}") + 100 + OVERHEAD_BYTES
    await records.correct(made, 700)
    assert await counted(redis) == made.num_bytes + 700 + OVERHEAD_BYTES


async def test_records_live_anywhere_in_a_cluster(redis_cluster_url: str) -> None:
    async with Store(redis_cluster_url) as store:
        records = Records(store, Ledger(store, max_share=0.5))
        made = [
            await records.create("thing", f"r{number}", {"owner": "", "n": number}, ttl_s=60) for number in range(8)
        ]
        assert [await records.read("thing", f"r{number}") for number in range(8)] == made

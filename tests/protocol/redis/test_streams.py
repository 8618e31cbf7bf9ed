"""Reads from streams, on a single server and in a cluster, under both protocols."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis import exceptions

from penstock.protocol.redis.connection import RedisClient, connect_blocking
from penstock.protocol.redis.streams import pairs, read_newest, read_range, read_streams, stream_entries

pytestmark = pytest.mark.every_server

A, B = "{s}a", "{s}b"  # in one hash slot


@pytest.fixture(params=["2", "3"])
async def reader(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[RedisClient]:
    client = connect_blocking(f"{redis_url}?protocol={request.param}", decode=False, block_s=1)
    for number in range(1, 4):
        await client.xadd(A, {"n": number}, id=f"{number}-0")
    await client.xadd(B, {"n": 9, "m": ""}, id="9-9")
    yield client
    await client.aclose()


@pytest.fixture
async def cluster_reader(redis_cluster_url: str) -> AsyncIterator[RedisClient]:
    client = connect_blocking(redis_cluster_url, decode=False, block_s=1)
    await client.xadd(A, {"n": 1}, id="1-0")
    await client.xadd(B, {"n": 9}, id="9-9")
    yield client
    await client.aclose()


async def test_each_stream_is_read_after_its_own_cursor(reader: RedisClient) -> None:
    found = await read_streams(reader, {A: "1-0", B: "0-0"}, count=10, block_s=None)
    assert dict(found) == {
        A.encode(): [(b"2-0", {b"n": b"2"}), (b"3-0", {b"n": b"3"})],
        B.encode(): [(b"9-9", {b"n": b"9", b"m": b""})],
    }
    assert await read_streams(reader, {A: "3-0", B: "9-9"}, count=10, block_s=None) == []
    assert await read_streams(reader, {A: "3-0", B: "9-9"}, count=10, block_s=0.01) == []


async def test_count_bounds_each_stream(reader: RedisClient) -> None:
    found = await read_streams(reader, {A: "0-0"}, count=2, block_s=None)
    assert [entry_id for entry_id, _ in found[0][1]] == [b"1-0", b"2-0"]


async def test_an_error_of_the_server_is_raised(reader: RedisClient) -> None:
    await reader.set("{s}text", "x")
    with pytest.raises(exceptions.ResponseError, match="WRONGTYPE"):
        await read_streams(reader, {A: "0-0", "{s}text": "0-0"}, count=1, block_s=None)


async def test_streams_of_one_slot_are_read_in_a_cluster(cluster_reader: RedisClient) -> None:
    found = await read_streams(cluster_reader, {A: "0-0", B: "0-0"}, count=10, block_s=0.5)
    assert dict(found) == {A.encode(): [(b"1-0", {b"n": b"1"})], B.encode(): [(b"9-9", {b"n": b"9"})]}
    assert await read_streams(cluster_reader, {A: "1-0"}, count=10, block_s=0.01) == []


async def test_a_range_and_the_newest_entry(reader: RedisClient) -> None:
    assert [entry_id for entry_id, _ in await read_range(reader, A, count=2)] == ["1-0", "2-0"]
    assert await read_range(reader, A, "(2-0", "+", count=9) == [("3-0", {b"n": b"3"})]
    assert await read_range(reader, A, "(3-0", count=9) == []
    assert await read_newest(reader, A) == ("3-0", {b"n": b"3"})
    assert await read_newest(reader, "{s}nothing") is None


def test_answers_of_both_protocols_become_one_shape() -> None:
    entry = (b"1-0", {b"n": b"1"})
    expected = [(b"s", [entry, (b"2-0", {})])]
    assert stream_entries([[b"s", [entry, (b"2-0", None)]]]) == expected
    assert stream_entries({b"s": [[entry, (b"2-0", None)]]}) == expected
    assert stream_entries(None) == stream_entries({}) == []


def test_fields_come_in_pairs_or_not_at_all() -> None:
    assert pairs([b"a", b"1", b"b", b"2"]) == {b"a": b"1", b"b": b"2"}
    with pytest.raises(ValueError, match="shorter"):
        pairs([b"a", b"1", b"b"])

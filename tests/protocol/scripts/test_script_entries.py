"""The scripts on a queue's entries and letters, on a real server: who may do what, and what a repeated call does."""

from __future__ import annotations

from typing import Any

import pytest
from redis import exceptions

from penstock.protocol import keys, scripts
from penstock.protocol.operations import dead_letters
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.faults import may_pass
from tests.protocol.scripts.script_calls import STREAM, owned, owners, put_back, run
from tests.support.patience import eventually
from tests.support.redis_servers.streams import read_raw_stream, read_stream, text_of

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.every_server]

LETTERS = keys.dead("q")


async def test_only_the_owner_s_acknowledgement_counts(raw: RedisClient) -> None:
    ids = await owned(raw, "a", 2)
    assert await run(raw, scripts.ack("q", worker="b", bills=[scripts.Bill(each, "", None) for each in ids])) == 0
    assert await raw.xlen(STREAM) == 2
    assert await run(raw, scripts.ack("q", worker="a", bills=[scripts.Bill(each, "", None) for each in ids])) == 2
    assert await run(raw, scripts.ack("q", worker="a", bills=[scripts.Bill(each, "", None) for each in ids])) == 0
    assert await raw.xlen(STREAM) == 0


async def test_of_what_has_left_no_account_is_kept(raw: RedisClient) -> None:
    first, second = await owned(raw, "a", 2)
    await raw.hset(keys.charged("q"), mapping={first: "5", second: "5"})
    await run(raw, scripts.ack("q", worker="a", bills=[scripts.Bill(first, "", None)]))
    assert await raw.hkeys(keys.charged("q")) == [second.encode()]
    await bury(raw, letter_of(5), entry_id=second, worker="a")
    assert not await raw.exists(keys.charged("q"))


async def test_only_the_owner_can_bury_and_only_once(raw: RedisClient) -> None:
    (entry_id,) = await owned(raw, "a")
    letter: list[str | bytes] = ["id", "r", b"field:x", b"\xff"]
    for worker, expected in (("b", 0), ("a", 1), ("a", 0)):
        assert await bury(raw, letter, entry_id=entry_id, worker=worker) == expected
    ((_, fields),) = await read_raw_stream(raw, keys.dead("q"))
    assert fields == {b"id": b"r", b"field:x": b"\xff"}
    assert await raw.xlen(STREAM) == 0
    assert await kept_bytes(raw) == len("id" + "r" + "field:x") + 1


async def test_the_oldest_letters_go_by_bytes(raw: RedisClient) -> None:
    for size in (300, 200, 100, 50, 250):
        await bury(raw, letter_of(size), max_bytes=600)
    assert await letter_sizes_of(raw) == [200, 100, 50, 250]
    await bury(raw, letter_of(251), max_bytes=600)
    assert await letter_sizes_of(raw) == [50, 250, 251]
    assert await kept_bytes(raw) == 551
    await bury(raw, letter_of(5000), max_bytes=600)  # the newest stays, whatever it takes
    assert await letter_sizes_of(raw) == [5000]
    await bury(raw, letter_of(20), max_bytes=600)
    assert await letter_sizes_of(raw) == [20]
    assert await raw.xlen(keys.letter_sizes(LETTERS)) == 1


async def test_the_oldest_letters_go_by_number(raw: RedisClient) -> None:
    for size in range(100, 110):
        await bury(raw, letter_of(size), max_entries=4)
    assert await letter_sizes_of(raw) == [106, 107, 108, 109]
    assert await kept_bytes(raw) == 106 + 107 + 108 + 109
    assert await raw.xlen(keys.letter_sizes(LETTERS)) == 4


async def test_letters_go_when_they_are_old(raw: RedisClient) -> None:
    for size in (100, 200):
        await bury(raw, letter_of(size), ttl_ms=10**6)
    (first, _), _ = await read_raw_stream(raw, LETTERS)
    assert 0 < await raw.pttl(LETTERS) <= 10**6  # where no other letter follows
    assert 0 < await raw.pttl(keys.letter_sizes(LETTERS)) <= 10**6
    assert 0 < await raw.pttl(keys.letter_bytes(LETTERS)) <= 10**6
    seconds, micros = await raw.time()
    age_ms = seconds * 1000 + micros // 1000 - int(first.split(b"-")[0])
    await eventually(lambda: passed_ms(raw, first, age_ms + 50))
    await bury(raw, letter_of(50), ttl_ms=age_ms + 25)
    assert await letter_sizes_of(raw) == [50]
    assert await kept_bytes(raw) == 50


async def test_letters_that_are_taken_give_their_bytes_back(raw: RedisClient) -> None:
    for size in (100, 200, 300, 50):
        await bury(raw, letter_of(size))
    letters = [letter async for letter in dead_letters.read_letters(raw, "q")]
    assert await dead_letters.remove(raw, "q", "request", [letters[1].id, letters[1].id, "1-1"]) == 1
    assert await kept_bytes(raw) == 450
    assert await dead_letters.replay(raw, "q", letters[2]) is not None
    assert await dead_letters.replay(raw, "q", letters[2]) is not None
    assert await kept_bytes(raw) == 150
    await raw.xreadgroup(keys.GROUP, "b", {STREAM: ">"})  # what was replayed
    await bury(raw, letter_of(450), max_bytes=600)  # nothing has to go
    assert await letter_sizes_of(raw) == [100, 50, 450]
    await dead_letters.remove(raw, "q", "request", [letter.id async for letter in dead_letters.read_letters(raw, "q")])
    await bury(raw, letter_of(70))
    assert await kept_bytes(raw) == 70


async def test_a_full_server_loses_no_letter(raw: RedisClient) -> None:
    """A full server is waited for, as it passes, unlike what Redis refuses for good."""
    (entry_id,) = await owned(raw, "a")
    await raw.config_set("maxmemory", 1)
    try:
        with pytest.raises(exceptions.ResponseError) as refused:
            await bury(raw, letter_of(100), entry_id=entry_id)
    finally:
        await raw.config_set("maxmemory", 0)
    assert may_pass(refused.value)
    assert await owners(raw) == {"a": 1}
    assert not await raw.exists(LETTERS)


async def test_letters_deleted_by_hand_are_counted_until_they_would_be_the_oldest(raw: RedisClient) -> None:
    for size in (100, 200, 300):
        await bury(raw, letter_of(size))
    ids = [letter_id for letter_id, _ in await read_raw_stream(raw, LETTERS)]
    await raw.xdel(LETTERS, ids[1])
    assert await kept_bytes(raw) == 600
    await bury(raw, letter_of(90), max_bytes=600)
    assert await letter_sizes_of(raw) == [300, 90]
    await bury(raw, letter_of(210), max_bytes=600)
    assert await letter_sizes_of(raw) == [300, 90, 210]
    await raw.delete(LETTERS)
    await bury(raw, letter_of(80))
    assert (await letter_sizes_of(raw), await kept_bytes(raw)) == ([80], 80)


@pytest.mark.parametrize("junk", ["nan", "1e999", "-5", "many"])
async def test_what_others_wrote_where_letters_are_counted_stops_nothing(raw: RedisClient, junk: str) -> None:
    for spoil in (
        lambda: raw.set(keys.letter_bytes(LETTERS), junk),
        lambda: raw.lpush(keys.letter_bytes(LETTERS), junk),
        lambda: raw.set(keys.letter_sizes(LETTERS), junk),
        lambda: raw.xadd(keys.letter_sizes(LETTERS), {"junk": junk}, id="18446744073709551615-18446744073709551615"),
    ):
        await raw.delete(keys.letter_bytes(LETTERS), keys.letter_sizes(LETTERS))
        await bury(raw, letter_of(60))
        await raw.delete(keys.letter_bytes(LETTERS), keys.letter_sizes(LETTERS))
        await spoil()
        assert await bury(raw, letter_of(100)) == 1
        assert await bury(raw, letter_of(100)) == 1
        assert await kept_bytes(raw) == 200


def letter_of(size: int) -> list[str]:
    """Returns the fields of a letter that takes `size` bytes."""
    fields = ["id", "r", "field:prompt", ""]
    return [*fields[:-1], "x" * (size - sum(map(len, fields)))]


@pytest.mark.parametrize("by", ["ack", "bury"])
async def test_an_id_is_marked_once_its_entry_has_left_with_an_end(raw: RedisClient, by: str) -> None:
    """Another entry with its id does not mark it, nor does a worker without the entry; the mark lasts as long as the id
    is known.
    """
    mine, other = await owned(raw, "a", 2)
    await raw.set(keys.seen("q", "r"), mine, ex=1000)

    async def leave(worker: str, entry: str) -> str:
        if by == "ack":
            bill = scripts.Bill(entry, "", None, ended_id="r")
            await run(raw, scripts.ack("q", worker=worker, bills=[scripts.Bill(other, "", None), bill]))
        else:
            limits = scripts.LetterLimits(max_entries=10, max_bytes=10**6, ttl_ms=10**6)
            more: dict[str, Any] = {"request_id": "r", "letters": LETTERS, "limits": limits, "fields": ["id", "r"]}
            await run(raw, scripts.bury("q", worker=worker, entry_id=entry, **more))
        return text_of(await raw.get(keys.seen("q", "r")))

    assert await leave("b", mine) == mine
    assert await leave("a", other) == mine
    assert await leave("a", mine) == keys.NO_ENTRY
    assert 0 < await raw.ttl(keys.seen("q", "r")) <= 1000
    await raw.delete(keys.seen("q", "r"))
    assert await run(raw, scripts.ack("q", worker="a", bills=[scripts.Bill(mine, "", None, ended_id="r")])) == 0
    assert not await raw.exists(keys.seen("q", "r"))


async def bury(
    redis: RedisClient,
    letter: list[str | bytes] | list[str],
    *,
    entry_id: str | None = None,
    worker: str = "a",
    max_entries: int = 100,
    max_bytes: int = 10**6,
    ttl_ms: int = 10**8,
) -> int:
    entry_id = entry_id or (await owned(redis, worker))[0]
    limits = scripts.LetterLimits(max_entries, max_bytes, ttl_ms)
    command = scripts.bury("q", worker=worker, entry_id=entry_id, letters=LETTERS, limits=limits, fields=letter)
    return int(await run(redis, command))


async def letter_sizes_of(redis: RedisClient) -> list[int]:
    return [
        sum(len(part) for pair in fields.items() for part in pair) for _, fields in await read_stream(redis, LETTERS)
    ]


async def kept_bytes(redis: RedisClient) -> int:
    return int(await redis.get(keys.letter_bytes(LETTERS)) or 0)


async def passed_ms(redis: RedisClient, entry_id: bytes, age_ms: int) -> bool:
    """Checks whether an entry is this old by the server's clock."""
    seconds, micros = await redis.time()
    return bool(seconds * 1000 + micros // 1000 >= int(entry_id.split(b"-")[0]) + age_ms)


async def test_what_is_given_back_is_taken_once_and_in_order(raw: RedisClient) -> None:
    ids = await owned(raw, "a", 3)
    assert await put_back(raw, "b", ids) == 0
    assert await put_back(raw, "a", ids) == 3
    limits: dict[str, Any] = {"max_body_bytes": 100, "max_bytes": 1000}
    found = [(await run(raw, scripts.take("q", worker=worker, count=2, **limits)))[0] for worker in ("b", "c", "c")]
    assert found[0] == [[entry_id.encode(), 7, 1, [b"prompt", b"x"]] for entry_id in ids[:2]]
    assert [len(each) for each in found] == [2, 1, 0]
    assert await owners(raw) == {"a": 0, keys.WAITING: 0, "b": 2, "c": 1}


async def test_only_the_dead_are_retired_and_only_the_empty_removed(raw: RedisClient) -> None:
    await owned(raw, "a", 3)
    await raw.set(keys.heartbeat("q", "a"), "i")
    retire = scripts.retire("q", stream=keys.requests("q"), consumer="a", count=2)
    assert await run(raw, retire) == -1
    await raw.delete(keys.heartbeat("q", "a"))
    assert await run(raw, retire) == 2
    assert await owners(raw) == {"a": 1, keys.WAITING: 2}
    assert await run(raw, retire) == 1
    assert await owners(raw) == {keys.WAITING: 3}
    assert await run(raw, retire) == 0

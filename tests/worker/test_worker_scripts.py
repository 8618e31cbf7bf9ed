"""Each script of the delivery protocol by itself, against a real server: who may do what, and what twice means."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis import exceptions
from worker_harness import eventually

from penstock.producer import keys
from penstock.producer.connection import RedisClient, connect
from penstock.worker import dead, faults, scripts
from penstock.worker.scripts import Claim, NotClaimed

STREAM = keys.requests("q")
LETTERS = keys.dead("q")
END = ["type", "end", "finish_reason", "stop"]


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[RedisClient]:
    client = connect(redis_url, decode=False)
    await client.xgroup_create(STREAM, keys.GROUP, id="0", mkstream=True)
    yield client
    await client.aclose()


async def run(redis: RedisClient, command: scripts.Command) -> Any:
    return await redis.execute_command(*command)


async def claim(redis: RedisClient, worker: str = "w", *, entry: str = "1-1", **more: str) -> Claim | NotClaimed:
    options = {"entry_id": entry, "worker": worker, "instance": f"i-{worker}", "ttl_ms": 10**6, **more}
    return scripts.parse_claim(await run(redis, scripts.claim("q", "r", **options)))  # type: ignore[arg-type]


async def owned(redis: RedisClient, worker: str, n: int = 1) -> list[str]:
    """Adds entries and reads them as `worker`."""
    ids = [(await redis.xadd(STREAM, {"prompt": "x"})).decode() for _ in range(n)]
    await redis.xreadgroup(keys.GROUP, worker, {STREAM: ">"}, count=n)
    return ids


async def owners(redis: RedisClient) -> dict[str, int]:
    consumers = await redis.xinfo_consumers(STREAM, keys.GROUP)
    return {consumer["name"].decode(): consumer["pending"] for consumer in consumers}


async def test_each_claim_takes_the_next_epoch_and_fences_the_last(raw: RedisClient) -> None:
    first, second = await claim(raw, "a"), await claim(raw, "b")
    assert isinstance(first, Claim)
    assert isinstance(second, Claim)
    assert (first.epoch, second.epoch) == (1, 2)
    assert second.first_server_ms == first.first_server_ms
    with pytest.raises(exceptions.ResponseError) as refused:
        await raw.xadd(keys.reply("q", "r"), {"type": "chunk"}, id="1-1")
    assert faults.is_stale_id(refused.value)
    assert (
        await run(raw, scripts.finish("q", "r", epoch=1, status="done", ttl_ms=1000, entries=[(1, END)])) == b"fenced"
    )
    own = [entry_id.decode() for entry_id, _ in await raw.xrange(keys.reply("q", "r"))]
    assert own == ["1-0", "2-0"]


async def test_epoch_stays_above_the_reply_s_even_without_state(raw: RedisClient) -> None:
    await raw.xadd(keys.reply("q", "r"), {"type": "chunk"}, id="7-3")
    again = await claim(raw)
    assert isinstance(again, Claim)
    assert again.epoch == 8


async def test_crashes_hand_backs_and_retries_are_told_apart(raw: RedisClient) -> None:
    async def counts(worker: str, **more: str) -> tuple[int, int, int, int]:
        answer = await claim(raw, worker, **more)
        assert isinstance(answer, Claim)
        return answer.attempts, answer.crashes, answer.strikes, answer.handbacks

    assert await counts("a") == (1, 0, 0, 0)
    assert await counts("a") == (2, 0, 0, 0)  # the answer was lost, the same process asks again
    assert await counts("a", instance="i-reborn") == (3, 1, 1, 0)  # same name, another process
    assert await counts("b") == (4, 2, 2, 0)
    await raw.xadd(keys.reply("q", "r"), {"type": "chunk"}, id="4-1")
    assert await counts("c") == (5, 3, 1, 0)  # the reply has grown since: its first strike again
    assert await run(raw, scripts.return_request("q", "r", epoch=5, handbacks=1)) == 1
    assert await run(raw, scripts.return_request("q", "r", epoch=5, handbacks=1)) == 0
    assert await counts("d") == (6, 3, 1, 1)
    assert await run(raw, scripts.return_request("q", "r", epoch=5, handbacks=1)) == 0  # no longer the owner


async def test_a_worker_that_was_only_frozen_takes_its_crash_back_once(raw: RedisClient) -> None:
    await claim(raw, "a")
    await claim(raw, "b")
    assert await run(raw, scripts.absolve("q", "r", epoch=2)) == 0  # the owner has no crash to take back
    assert await run(raw, scripts.absolve("q", "r", epoch=1)) == 1
    assert await run(raw, scripts.absolve("q", "r", epoch=1)) == 0
    assert await raw.hmget(keys.state("q", "r"), "crashes", "strikes") == [b"0", b"0"]
    assert await run(raw, scripts.absolve("q", "gone", epoch=1)) == 0
    assert not await raw.exists(keys.state("q", "gone"))


async def test_finish_is_all_at_once_and_only_once(raw: RedisClient) -> None:
    await claim(raw)
    await raw.set(keys.cancel("q", "r"), 1)
    chunk = ["type", "chunk", "text", "a"]
    command = scripts.finish("q", "r", epoch=1, status="done", ttl_ms=5000, entries=[(4, chunk), (5, END)])
    assert await run(raw, command) == b"ok"
    assert await run(raw, command) == b"already"
    entries = await raw.xrange(keys.reply("q", "r"))
    assert [entry_id for entry_id, _ in entries] == [b"1-0", b"1-4", b"1-5"]
    for key in (keys.reply("q", "r"), keys.state("q", "r")):
        assert 0 < await raw.pttl(key) <= 5000
    assert not await raw.exists(keys.cancel("q", "r"))
    assert await claim(raw, "b") == NotClaimed("done")
    assert await claim(raw, "b", entry="2-2") == NotClaimed("done")


async def test_an_end_without_state_is_an_end(raw: RedisClient) -> None:
    await claim(raw)
    await run(raw, scripts.finish("q", "r", epoch=1, status="done", ttl_ms=5000, entries=[(1, END)]))
    await raw.delete(keys.state("q", "r"))
    assert await claim(raw) == NotClaimed("done")


async def test_given_up_requests_are_buried_by_whoever_finds_the_entry(raw: RedisClient) -> None:
    await claim(raw)
    await run(raw, scripts.finish("q", "r", epoch=1, status="dead", ttl_ms=5000, entries=[(1, END)]))
    assert await claim(raw, "b") == NotClaimed("dead")
    assert await claim(raw, "b", entry="2-2") == NotClaimed("done")


async def test_another_entry_of_the_same_id_is_a_duplicate_until_the_first_is_gone(raw: RedisClient) -> None:
    await claim(raw, entry="1-1")
    assert await claim(raw, entry="2-2") == NotClaimed("duplicate", "1-1")
    assert isinstance(await claim(raw, entry="2-2", gone_entry="1-1"), Claim)
    assert await claim(raw, entry="1-1") == NotClaimed("duplicate", "2-2")


async def test_only_the_owner_s_acknowledgement_counts(raw: RedisClient) -> None:
    ids = await owned(raw, "a", 2)
    assert await run(raw, scripts.ack("q", worker="b", entry_ids=ids)) == 0
    assert await raw.xlen(STREAM) == 2
    assert await run(raw, scripts.ack("q", worker="a", entry_ids=ids)) == 2
    assert await run(raw, scripts.ack("q", worker="a", entry_ids=ids)) == 0
    assert await raw.xlen(STREAM) == 0


async def test_only_the_owner_can_bury_and_only_once(raw: RedisClient) -> None:
    (entry_id,) = await owned(raw, "a")
    letter = ["id", "r", b"field:x", b"\xff"]
    for worker, expected in (("b", 0), ("a", 1), ("a", 0)):
        assert await bury(raw, letter, entry_id=entry_id, worker=worker) == expected
    ((_, fields),) = await raw.xrange(keys.dead("q"))
    assert fields == {b"id": b"r", b"field:x": b"\xff"}
    assert await raw.xlen(STREAM) == 0
    assert await kept_bytes(raw) == len("id" + "r" + "field:x") + 1


async def test_the_oldest_letters_make_room_by_bytes(raw: RedisClient) -> None:
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


async def test_the_oldest_letters_make_room_by_number(raw: RedisClient) -> None:
    for size in range(100, 110):
        await bury(raw, letter_of(size), max_entries=4)
    assert await letter_sizes_of(raw) == [106, 107, 108, 109]
    assert await kept_bytes(raw) == 106 + 107 + 108 + 109
    assert await raw.xlen(keys.letter_sizes(LETTERS)) == 4


async def test_letters_go_when_they_are_old(raw: RedisClient) -> None:
    for size in (100, 200):
        await bury(raw, letter_of(size), ttl_ms=10**6)
    (first, _), _ = await raw.xrange(LETTERS)
    assert 0 < await raw.pttl(LETTERS) <= 10**6  # where no other letter follows
    assert 0 < await raw.pttl(keys.letter_sizes(LETTERS)) <= 10**6
    seconds, micros = await raw.time()
    age_ms = seconds * 1000 + micros // 1000 - int(first.split(b"-")[0])
    await eventually(lambda: passed_ms(raw, first, age_ms + 50))
    await bury(raw, letter_of(50), ttl_ms=age_ms + 25)
    assert await letter_sizes_of(raw) == [50]
    assert await kept_bytes(raw) == 50


async def test_letters_that_are_taken_give_their_bytes_back(raw: RedisClient) -> None:
    for size in (100, 200, 300, 50):
        await bury(raw, letter_of(size))
    letters = [letter async for letter in dead.read_letters(raw, "q")]
    assert await dead.remove(raw, "q", "request", [letters[1].id, letters[1].id, "1-1"]) == 1
    assert await kept_bytes(raw) == 450
    assert await dead.replay(raw, "q", letters[2]) is not None
    assert await dead.replay(raw, "q", letters[2]) is not None
    assert await kept_bytes(raw) == 150
    await raw.xreadgroup(keys.GROUP, "b", {STREAM: ">"})  # what was replayed
    await bury(raw, letter_of(450), max_bytes=600)  # nothing has to go
    assert await letter_sizes_of(raw) == [100, 50, 450]
    await dead.remove(raw, "q", "request", [letter.id async for letter in dead.read_letters(raw, "q")])
    await bury(raw, letter_of(70))
    assert await kept_bytes(raw) == 70


async def test_a_full_server_loses_no_letter(raw: RedisClient) -> None:
    """What passes is to be waited for, unlike what Redis refuses for good."""
    (entry_id,) = await owned(raw, "a")
    await raw.config_set("maxmemory", 1)
    try:
        with pytest.raises(exceptions.ResponseError) as refused:
            await bury(raw, letter_of(100), entry_id=entry_id)
    finally:
        await raw.config_set("maxmemory", 0)
    assert faults.is_passing(refused.value)
    assert await owners(raw) == {"a": 1}
    assert not await raw.exists(LETTERS)


async def test_letters_deleted_by_hand_are_counted_until_they_would_be_the_oldest(raw: RedisClient) -> None:
    for size in (100, 200, 300):
        await bury(raw, letter_of(size))
    ids = [letter_id for letter_id, _ in await raw.xrange(LETTERS)]
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
    """The fields of a letter that takes `size` bytes."""
    fields = ["id", "r", "field:prompt", ""]
    return [*fields[:-1], "x" * (size - sum(map(len, fields)))]


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
    return [sum(len(part) for pair in fields.items() for part in pair) for _, fields in await redis.xrange(LETTERS)]


async def kept_bytes(redis: RedisClient) -> int:
    return int(await redis.get(keys.letter_bytes(LETTERS)) or 0)


async def passed_ms(redis: RedisClient, entry_id: bytes, age_ms: int) -> bool:
    """Whether an entry is this old by the server's clock."""
    seconds, micros = await redis.time()
    return bool(seconds * 1000 + micros // 1000 >= int(entry_id.split(b"-")[0]) + age_ms)


async def test_entries_given_back_are_adopted_once_and_in_order(raw: RedisClient) -> None:
    ids = await owned(raw, "a", 3)
    assert await run(raw, scripts.disown("q", worker="b", entry_ids=ids)) == 0
    assert await run(raw, scripts.disown("q", worker="a", entry_ids=ids)) == 3
    adopted = await run(raw, scripts.adopt("q", worker="b", count=2))
    assert adopted == [[ids[0].encode(), [b"prompt", b"x"]], [ids[1].encode(), [b"prompt", b"x"]]]
    assert len(await run(raw, scripts.adopt("q", worker="c", count=2))) == 1
    assert await run(raw, scripts.adopt("q", worker="c", count=2)) == []
    assert await owners(raw) == {"a": 0, keys.UNOWNED: 0, "b": 2, "c": 1}


async def test_only_the_dead_are_retired_and_only_the_empty_removed(raw: RedisClient) -> None:
    await owned(raw, "a", 3)
    await raw.set(keys.heartbeat("q", "a"), "i")
    retire = scripts.retire("q", consumer="a", count=2)
    assert await run(raw, retire) == -1
    await raw.delete(keys.heartbeat("q", "a"))
    assert await run(raw, retire) == 2
    assert await owners(raw) == {"a": 1, keys.UNOWNED: 2}
    assert await run(raw, retire) == 1
    assert await owners(raw) == {keys.UNOWNED: 3}


async def test_leaving_takes_only_one_s_own_heartbeat_and_never_pending_entries(raw: RedisClient) -> None:
    await owned(raw, "a")
    await raw.set(keys.heartbeat("q", "a"), "i-new")
    assert await run(raw, scripts.leave("q", worker="a", instance="i-old")) == 0
    assert await run(raw, scripts.leave("q", worker="a", instance="i-new")) == 1
    assert await owners(raw) == {"a": 1}
    await raw.set(keys.heartbeat("q", "b"), "i")
    await raw.xgroup_createconsumer(STREAM, keys.GROUP, "b")
    assert await run(raw, scripts.leave("q", worker="b", instance="i")) == 1
    assert await owners(raw) == {"a": 1}

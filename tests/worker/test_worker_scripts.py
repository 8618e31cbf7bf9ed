"""Each script of the delivery protocol by itself, against a real server: who may do what, and what twice means."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Literal

import pytest
from fakes import ranked
from redis import exceptions
from worker_harness import eventually

from penstock.producer import keys
from penstock.producer.redis.connection import RedisClient, connect
from penstock.producer.redis.pipeline import Command
from penstock.worker.protocol import dead_letters, faults, scripts
from penstock.worker.protocol.scripts import Claim, NotClaimed, Standing

STREAM = keys.requests("q")
LETTERS = keys.dead("q")
END = ["type", "end", "finish_reason", "stop"]


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[RedisClient]:
    client = connect(redis_url, decode=False)
    await client.xgroup_create(STREAM, keys.GROUP, id="0", mkstream=True)
    yield client
    await client.aclose()


async def run(redis: RedisClient, command: Command) -> Any:
    return await redis.execute_command(*command)


async def try_claim(
    redis: RedisClient, worker: str = "w", *, entry: str = "1-1", instance: str = "", gone_entry: str = ""
) -> Claim | NotClaimed:
    instance = instance or f"i-{worker}"
    command = scripts.claim(
        "q", "r", entry_id=entry, worker=worker, instance=instance, ttl_ms=10**6, gone_entry=gone_entry
    )
    return scripts.parse_claim(await run(redis, command), instance)


async def claim(redis: RedisClient, worker: str = "w", *, instance: str = "") -> Claim:
    answer = await try_claim(redis, worker, instance=instance)
    assert isinstance(answer, Claim)
    return answer


async def finish(redis: RedisClient, claimed: Claim, *, last: int = 0, status: Literal["done", "dead"] = "done") -> Any:
    command = scripts.finish(
        "q", "r", claim=claimed, last_number=last, status=status, ttl_ms=5000, entries=[(last + 1, END)]
    )
    return await run(redis, command)


async def owned(redis: RedisClient, worker: str, n: int = 1) -> list[str]:
    """Adds entries and reads them as `worker`."""
    ids = [(await redis.xadd(STREAM, {"prompt": "x"})).decode() for _ in range(n)]
    await redis.xreadgroup(keys.GROUP, worker, {STREAM: ">"}, count=n)
    return ids


async def owners(redis: RedisClient) -> dict[str, int]:
    consumers = await redis.xinfo_consumers(STREAM, keys.GROUP)
    return {consumer["name"].decode(): consumer["pending"] for consumer in consumers}


async def test_each_claim_takes_a_higher_epoch_and_fences_the_last(raw: RedisClient) -> None:
    first, second = await claim(raw, "a"), await claim(raw, "b")
    assert first.epoch < second.epoch < 2**53
    assert second.first_server_ms == first.first_server_ms
    assert (first.has_journal, second.has_journal) == (False, True)
    with pytest.raises(exceptions.ResponseError) as refused:
        await raw.xadd(keys.reply("q", "r"), {"type": "chunk"}, id=f"{first.epoch}-1")
    assert faults.is_stale_id(refused.value)
    assert await finish(raw, first) == b"fenced"
    entries = await raw.xrange(keys.reply("q", "r"))
    assert ranked(entry_id for entry_id, _ in entries) == ["1-0", "2-0"]
    assert [fields[b"turn"] for _, fields in entries] == [b"1", b"2"]
    assert [int(fields[b"epoch"]) for _, fields in entries] == [first.epoch, second.epoch]


@pytest.mark.parametrize("is_behind", [False, True], ids=["", "clock behind"])
async def test_no_two_claims_share_an_epoch_whatever_was_rolled_back(raw: RedisClient, is_behind: bool) -> None:
    """The same claim on the same data, as if each one had been lost; also by a clock that is behind the reply."""
    state, reply = keys.state("q", "r"), keys.reply("q", "r")
    ahead = (int((await raw.time())[0]) + 10_000) * 10**6
    found = set()
    for number in range(200):
        await raw.delete(state, reply)
        if is_behind:
            await raw.xadd(reply, {"type": "chunk", "tokens": ""}, id=f"{ahead}-7")
        epoch = (await claim(raw, instance=f"i{number}")).epoch
        assert epoch > ahead * is_behind
        found.add(epoch)
    assert len(found) == 200


async def test_epochs_stay_above_the_reply_s_and_the_state_s(raw: RedisClient) -> None:
    ahead = (int((await raw.time())[0]) + 100) * 10**6
    await raw.hset(keys.state("q", "r"), "epoch", str(ahead))
    first = await claim(raw)
    assert first.epoch > ahead
    await raw.delete(keys.state("q", "r"))
    assert (await claim(raw)).epoch > first.epoch


@pytest.mark.parametrize("junk", ["abc", "-1", "nan", "inf", "1e300", "99999999999999999999", "0x10", "1.5"])
async def test_an_epoch_that_no_claim_wrote_counts_for_nothing(raw: RedisClient, junk: str) -> None:
    await raw.hset(keys.state("q", "r"), mapping={"epoch": junk, "attempts": junk, "status": "running"})
    first = await claim(raw)
    assert 0 < first.epoch < scripts.MAX_EPOCH
    assert await finish(raw, first) == b"ok"


async def test_above_the_largest_id_nothing_can_be_written(raw: RedisClient) -> None:
    await raw.xadd(keys.reply("q", "r"), {"type": "chunk"}, id=f"{2**64 - 1}-{2**64 - 1}")
    assert await try_claim(raw) == NotClaimed("unwritable")


async def test_finish_asks_for_the_instance_and_for_what_was_written_last(raw: RedisClient) -> None:
    """Two owners may have the same epoch, by the smallest of chances; and entries may be lost without the claim."""
    claimed = await claim(raw)
    await raw.xadd(keys.reply("q", "r"), {"type": "chunk"}, id=f"{claimed.epoch}-1")
    assert await finish(raw, replace(claimed, instance="twin"), last=1) == b"fenced"
    assert await finish(raw, claimed, last=2) == b"lost"
    await raw.xadd(keys.reply("q", "r"), {"type": "chunk"}, id=f"{claimed.epoch}-2")
    assert await finish(raw, claimed, last=1) == b"lost"
    assert await finish(raw, claimed, last=2) == b"ok"


async def test_standing_names_the_owner_and_the_entry(raw: RedisClient) -> None:
    assert scripts.parse_standing(await run(raw, scripts.newest("q", "r"))) == Standing(None, None)
    claimed = await claim(raw)
    await raw.xadd(keys.reply("q", "r"), {"type": "chunk", "text": "a"}, id=f"{claimed.epoch}-1")
    newest = scripts.parse_standing(await run(raw, scripts.newest("q", "r")))
    assert newest.entry_id == f"{claimed.epoch}-1"
    assert newest.is_of(claimed)
    assert not newest.is_of(replace(claimed, instance="twin"))
    found = scripts.parse_standing(await run(raw, scripts.find("q", "r", f"{claimed.epoch}-1")))
    assert (found.entry_id, found.fields) == (newest.entry_id, (b"type", b"chunk", b"text", b"a"))
    nothing = scripts.parse_standing(await run(raw, scripts.find("q", "r", f"{claimed.epoch}-2")))
    assert (nothing.owner, nothing.entry_id) == (found.owner, None)


async def test_crashes_hand_backs_and_retries_are_told_apart(raw: RedisClient) -> None:
    async def counts(worker: str, instance: str = "") -> tuple[int, int, int, int]:
        nonlocal epoch
        answer = await claim(raw, worker, instance=instance)
        epoch = answer.epoch
        return answer.attempts, answer.crashes, answer.strikes, answer.handbacks

    epoch = 0
    assert await counts("a") == (1, 0, 0, 0)
    assert await counts("a") == (2, 0, 0, 0)  # the answer was lost, the same process asks again
    assert await counts("a", instance="i-reborn") == (3, 1, 1, 0)  # same name, another process
    assert await counts("b") == (4, 2, 2, 0)
    await raw.xadd(keys.reply("q", "r"), {"type": "chunk"}, id=f"{epoch}-1")
    assert await counts("c") == (5, 3, 1, 0)  # the reply has grown since: its first strike again
    before = epoch
    assert await run(raw, scripts.return_request("q", "r", epoch=before, handbacks=1)) == 1
    assert await run(raw, scripts.return_request("q", "r", epoch=before, handbacks=1)) == 0
    assert await counts("d") == (6, 3, 1, 1)
    assert await run(raw, scripts.return_request("q", "r", epoch=before, handbacks=1)) == 0  # no longer the owner


async def test_a_worker_that_was_only_frozen_takes_its_crash_back_once(raw: RedisClient) -> None:
    first, second = await claim(raw, "a"), await claim(raw, "b")
    assert await run(raw, scripts.absolve("q", "r", epoch=second.epoch)) == 0  # the owner has no crash to take back
    assert await run(raw, scripts.absolve("q", "r", epoch=first.epoch)) == 1
    assert await run(raw, scripts.absolve("q", "r", epoch=first.epoch)) == 0
    assert await raw.hmget(keys.state("q", "r"), "crashes", "strikes") == [b"0", b"0"]
    assert await run(raw, scripts.absolve("q", "gone", epoch=1)) == 0
    assert not await raw.exists(keys.state("q", "gone"))


async def test_a_crash_that_the_server_never_counted_is_not_taken_back(raw: RedisClient) -> None:
    """The claim of the frozen worker was lost, so its heir's was the first."""
    lost = await claim(raw, "a")
    await raw.delete(keys.state("q", "r"), keys.reply("q", "r"))
    await claim(raw, "b")
    await run(raw, scripts.absolve("q", "r", epoch=lost.epoch))
    assert await raw.hmget(keys.state("q", "r"), "crashes", "strikes") == [None, None]


async def test_finish_is_all_at_once_and_only_once(raw: RedisClient) -> None:
    claimed = await claim(raw)
    await raw.set(keys.cancel("q", "r"), 1)
    entries = [(4, ["type", "chunk", "text", "a"]), (5, END)]
    command = scripts.finish("q", "r", claim=claimed, last_number=0, status="done", ttl_ms=5000, entries=entries)
    assert await run(raw, command) == b"ok"
    assert await run(raw, command) == b"already"
    written = await raw.xrange(keys.reply("q", "r"))
    assert ranked(entry_id for entry_id, _ in written) == ["1-0", "1-4", "1-5"]
    for key in (keys.reply("q", "r"), keys.state("q", "r")):
        assert 0 < await raw.pttl(key) <= 5000
    assert not await raw.exists(keys.cancel("q", "r"))
    assert await try_claim(raw, "b") == NotClaimed("done")
    assert await try_claim(raw, "b", entry="2-2") == NotClaimed("done")


async def test_an_end_without_state_is_an_end(raw: RedisClient) -> None:
    assert await finish(raw, await claim(raw)) == b"ok"
    await raw.delete(keys.state("q", "r"))
    assert await try_claim(raw) == NotClaimed("done")


async def test_given_up_requests_are_buried_by_whoever_finds_the_entry(raw: RedisClient) -> None:
    assert await finish(raw, await claim(raw), status="dead") == b"ok"
    assert await try_claim(raw, "b") == NotClaimed("dead")
    assert await try_claim(raw, "b", entry="2-2") == NotClaimed("done")


async def test_another_entry_of_the_same_id_is_a_duplicate_until_the_first_is_gone(raw: RedisClient) -> None:
    await claim(raw)
    assert await try_claim(raw, entry="2-2") == NotClaimed("duplicate", "1-1")
    assert isinstance(await try_claim(raw, entry="2-2", gone_entry="1-1"), Claim)
    assert await try_claim(raw, entry="1-1") == NotClaimed("duplicate", "2-2")


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
    limits = {"count": 2, "max_body_bytes": 100, "max_bytes": 1000}
    adopted = await run(raw, scripts.adopt("q", worker="b", **limits))
    assert adopted == [[entry_id.encode(), 7, 1, [b"prompt", b"x"]] for entry_id in ids[:2]]
    assert len(await run(raw, scripts.adopt("q", worker="c", **limits))) == 1
    assert await run(raw, scripts.adopt("q", worker="c", **limits)) == []
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

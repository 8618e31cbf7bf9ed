"""The scripts on one request, on a real server: who may do what, and what a repeated call does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from redis import exceptions

from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.faults import is_stale_id
from penstock.protocol.scripts import Claim, ClaimState, EarlierClaim, NotClaimed
from tests.protocol.scripts.script_calls import run
from tests.support.programs.fakes import ranked
from tests.support.redis_servers.streams import add_entry, read_raw_stream

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.every_server]

END = ["type", "end", "finish_reason", "stop"]


async def try_claim(
    redis: RedisClient, worker: str = "w", *, entry: str = "1-1", instance: str = "", **options: Any
) -> Claim | NotClaimed:
    instance = instance or f"i-{worker}"
    command = scripts.claim("q", "r", entry_id=entry, worker=worker, instance=instance, ttl_ms=10**6, **options)
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


async def test_each_claim_takes_a_higher_epoch_and_fences_the_last(raw: RedisClient) -> None:
    first, second = await claim(raw, "a"), await claim(raw, "b")
    assert first.epoch < second.epoch < 2**53
    assert second.first_server_ms == first.first_server_ms
    assert (first.has_journal, second.has_journal) == (False, True)
    with pytest.raises(exceptions.ResponseError) as refused:
        await raw.xadd(keys.reply("q", "r"), {"type": "chunk"}, id=f"{first.epoch}-1")
    assert is_stale_id(refused.value)
    assert await finish(raw, first) == b"fenced"
    entries = await read_raw_stream(raw, keys.reply("q", "r"))
    assert ranked(entry_id for entry_id, _ in entries) == ["1-0", "2-0"]
    assert [fields[b"turn"] for _, fields in entries] == [b"1", b"2"]
    assert [int(fields[b"epoch"]) for _, fields in entries] == [first.epoch, second.epoch]


async def test_a_claim_tells_of_the_one_before(raw: RedisClient) -> None:
    """A claim says whether that worker gave the request back: if not, only the next one can say how it ended."""
    first, second = await claim(raw, "a"), await claim(raw, "b")
    assert (first.earlier, second.earlier) == (None, EarlierClaim(first.epoch, "a", was_held=True))
    await run(raw, scripts.return_request("q", "r", epoch=second.epoch, handbacks=1))
    assert (await claim(raw, "c")).earlier == EarlierClaim(second.epoch, "b", was_held=False)


async def test_an_epoch_that_is_none_is_nobodys_claim(raw: RedisClient) -> None:
    await raw.hset(keys.state("q", "r"), mapping={"epoch": "nonsense", "worker": b"\xff", "status": "running"})
    assert (await claim(raw)).earlier is None


@pytest.mark.parametrize("is_behind", [False, True], ids=["", "clock behind"])
async def test_no_two_claims_share_an_epoch_whatever_was_rolled_back(raw: RedisClient, is_behind: bool) -> None:
    """The same claim runs on the same data, as if each one had been lost; also with a clock that is behind
    the reply.
    """
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
    await raw.hset(keys.state("q", "r"), mapping={"epoch": junk, "status": "running"})
    first = await claim(raw)
    assert 0 < first.epoch < scripts.MAX_EPOCH
    assert await finish(raw, first) == b"ok"


@pytest.mark.parametrize("junk", ["", "abc", "-1", "1.5", "nan", "1e300", "9" * 16, b"\xff", "1" * 100_000])
@pytest.mark.parametrize("field", ["claimed_ms", "attempts", "crashes", "strikes", "handbacks"])
async def test_a_count_that_is_none_is_named_and_nothing_is_written(
    raw: RedisClient, field: str, junk: str | bytes
) -> None:
    await raw.hset(keys.state("q", "r"), mapping={field: junk, "status": "queued"})
    assert await try_claim(raw) == NotClaimed("junk", field=field)
    assert await raw.hgetall(keys.state("q", "r")) == {
        field.encode(): junk if isinstance(junk, bytes) else junk.encode(),
        b"status": b"queued",
    }
    assert not await raw.exists(keys.reply("q", "r"))


async def test_above_the_largest_id_nothing_can_be_written(raw: RedisClient) -> None:
    await raw.xadd(keys.reply("q", "r"), {"type": "chunk"}, id=f"{2**64 - 1}-{2**64 - 1}")
    assert await try_claim(raw) == NotClaimed("unwritable")


async def test_finish_asks_for_the_instance_and_for_what_was_written_last(raw: RedisClient) -> None:
    """By a small chance two owners have the same epoch; and entries may be lost without the claim."""
    claimed = await claim(raw)
    await raw.xadd(keys.reply("q", "r"), {"type": "chunk"}, id=f"{claimed.epoch}-1")
    assert await finish(raw, replace(claimed, instance="twin"), last=1) == b"fenced"
    assert await finish(raw, claimed, last=2) == b"lost"
    await raw.xadd(keys.reply("q", "r"), {"type": "chunk"}, id=f"{claimed.epoch}-2")
    assert await finish(raw, claimed, last=1) == b"lost"
    assert await finish(raw, claimed, last=2) == b"ok"


async def test_standing_names_the_owner_and_the_entry(raw: RedisClient) -> None:
    assert scripts.parse_standing(await run(raw, scripts.newest("q", "r"))) == ClaimState(None, None)
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
    epoch = 0

    async def counts(worker: str, instance: str = "") -> tuple[int, int, int, int]:
        nonlocal epoch
        answer = await claim(raw, worker, instance=instance)
        epoch = answer.epoch
        return answer.attempts, answer.crashes, answer.strikes, answer.handbacks

    assert await counts("a") == (1, 0, 0, 0)
    assert await counts("a") == (2, 0, 0, 0)  # the answer was lost, the same process asks again
    assert await counts("a", instance="i-reborn") == (3, 1, 1, 0)  # same name, another process
    assert await counts("b") == (4, 2, 2, 0)
    await raw.xadd(keys.reply("q", "r"), {"type": "chunk"}, id=f"{epoch}-1")
    assert await counts("c") == (5, 3, 1, 0)  # the reply has grown since: its first strike again
    before = epoch
    await raw.xadd(keys.reply("q", "r"), {"type": "chunk", "tokens": "", "prefill_done": 9}, id=f"{epoch}-1")
    assert await counts("c", instance="i-anew") == (6, 4, 2, 0)  # how far a prompt was is lost with its worker
    assert await raw.hget(keys.state("q", "r"), "begun") == b"1"
    before = epoch
    assert await run(raw, scripts.return_request("q", "r", epoch=before, handbacks=1)) == 1
    assert await run(raw, scripts.return_request("q", "r", epoch=before, handbacks=1)) == 0
    assert await counts("d") == (7, 4, 2, 1)
    assert await run(raw, scripts.return_request("q", "r", epoch=before, handbacks=1)) == 0  # no longer the owner


async def test_a_reply_without_tokens_is_of_no_model(raw: RedisClient) -> None:
    """Another model may answer a request whose worker died within the prompt."""
    first = await try_claim(raw, "a", digest="one")
    assert isinstance(first, Claim)
    await raw.xadd(keys.reply("q", "r"), {"type": "chunk", "tokens": "", "prefill_done": 9}, id=f"{first.epoch}-1")
    second = await try_claim(raw, "b", digest="other")
    assert isinstance(second, Claim)
    assert not second.is_of_other_model
    assert await raw.hmget(keys.state("q", "r"), "begun", "digest") == [None, b"other"]


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
    written = await read_raw_stream(raw, keys.reply("q", "r"))
    assert ranked(entry_id for entry_id, _ in written) == ["1-0", "1-4", "1-5"]
    for key in (keys.reply("q", "r"), keys.state("q", "r")):
        assert 0 < await raw.pttl(key) <= 5000
    assert not await raw.exists(keys.cancel("q", "r"))
    assert await try_claim(raw, "b") == NotClaimed("done")
    assert await try_claim(raw, "b", entry="2-2") == NotClaimed("done")


@pytest.mark.parametrize("status", ["done", "dead"])
async def test_what_comes_after_the_end_changes_nothing(raw: RedisClient, status: Literal["done", "dead"]) -> None:
    frozen, claimed = await claim(raw, "a"), await claim(raw, "b")
    assert await finish(raw, claimed, status=status) == b"ok"
    before = await raw.hgetall(keys.state("q", "r")), await read_raw_stream(raw, keys.reply("q", "r"))
    assert before[0][b"crashes"] == b"1"
    assert await finish(raw, claimed, last=1, status=status) == b"already"
    assert await run(raw, scripts.absolve("q", "r", epoch=frozen.epoch)) == 0
    assert (await raw.hgetall(keys.state("q", "r")), await read_raw_stream(raw, keys.reply("q", "r"))) == before


async def test_an_end_of_an_earlier_claim_by_the_same_process_is_refused(raw: RedisClient) -> None:
    first, second = await claim(raw), await claim(raw)
    assert await finish(raw, first) == b"fenced"
    assert await finish(raw, second) == b"ok"


async def test_an_end_of_a_reply_that_is_gone_is_lost(raw: RedisClient) -> None:
    claimed = await claim(raw)
    await raw.delete(keys.reply("q", "r"))
    assert await finish(raw, claimed) == b"lost"


AHEAD = 2**52  # an epoch above any of the clock
REPLIES: dict[str, tuple[dict[str, str], bytes]] = {
    "none": ({}, b"ok"),
    "claimed": ({"type": "own"}, b"ok"),
    "begun": ({"type": "chunk", "text": "end"}, b"ok"),
    "begun, of other words": ({"text": "type", "kind": "end"}, b"ok"),
    "ended": ({"finish_reason": "stop", "type": "end"}, b"already"),
}


@pytest.mark.parametrize("name", REPLIES)
async def test_what_cannot_be_claimed_ends_once(raw: RedisClient, name: str) -> None:
    last, expected = REPLIES[name]
    reply = keys.reply("q", "r")
    if last:
        await add_entry(raw, reply, last, entry_id=f"{AHEAD}-7")
    command = scripts.end_unclaimed("q", "r", ttl_ms=5000, fields=END)
    assert [await run(raw, command) for _ in range(2)] == [expected, b"already"]
    entries = await read_raw_stream(raw, reply)
    assert len(entries) == bool(last) + (expected == b"ok")
    assert entries[-1][1][b"type"] == b"end"
    if expected == b"ok":
        assert 0 < await raw.pttl(reply) <= 5000
        assert int(entries[-1][0].split(b"-")[0]) > AHEAD * bool(last)
    assert await try_claim(raw) == NotClaimed("done")


@pytest.mark.parametrize("epoch", [scripts.MAX_EPOCH, 2**60])
async def test_above_the_highest_epoch_nothing_ends(raw: RedisClient, epoch: int) -> None:
    await raw.xadd(keys.reply("q", "r"), {"type": "chunk"}, id=f"{epoch}-0")
    assert await run(raw, scripts.end_unclaimed("q", "r", ttl_ms=5000, fields=END)) == b"unwritable"
    assert await raw.xlen(keys.reply("q", "r")) == 1


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


async def write(redis: RedisClient, claimed: Claim | NotClaimed) -> None:
    assert isinstance(claimed, Claim)
    await redis.xadd(keys.reply("q", "r"), {"type": "chunk"}, id=f"{claimed.epoch}-1")


async def test_a_reply_that_is_not_begun_is_any_model_s(raw: RedisClient) -> None:
    await try_claim(raw, "a", digest="A")
    assert isinstance(await try_claim(raw, "b", digest="B"), Claim)
    digests = [fields[b"digest"] for _, fields in await read_raw_stream(raw, keys.reply("q", "r"))]
    assert digests == [b"A", b"B"]


async def test_a_reply_that_is_begun_is_its_model_s_alone(raw: RedisClient) -> None:
    await write(raw, await try_claim(raw, "a", digest="A"))
    for _ in range(2):  # the second time, the last entry is a claim
        assert await try_claim(raw, "b", digest="B") == NotClaimed("other_model", digest="A")
        again = await try_claim(raw, "a", digest="A")
        assert isinstance(again, Claim)
        assert not again.is_of_other_model
    assert await raw.xlen(keys.reply("q", "r")) == 4


async def test_it_is_taken_by_another_model_to_be_ended(raw: RedisClient) -> None:
    await write(raw, await try_claim(raw, "a", digest="A"))
    for _ in range(2):  # that it was taken so makes it nobody else's
        last = await try_claim(raw, "b", digest="B", any_model=True)
        assert isinstance(last, Claim)
        assert last.is_of_other_model
    assert isinstance(last, Claim)
    assert await try_claim(raw, "b", digest="B") == NotClaimed("other_model", digest="A")
    assert await finish(raw, last) == b"ok"


async def exact_claim(redis: RedisClient, worker: str, arithmetic: str) -> bool:
    claimed = await try_claim(redis, worker, arithmetic=arithmetic, any_arithmetic="continue")
    assert isinstance(claimed, Claim)
    return claimed.is_exact


async def test_a_reply_that_several_arithmetics_generate_says_so_from_then_on(raw: RedisClient) -> None:
    assert await exact_claim(raw, "a", "A")
    assert await exact_claim(raw, "b", "B")  # nothing was generated
    await write(raw, await try_claim(raw, "b", arithmetic="B"))
    assert await exact_claim(raw, "c", "B")
    assert not await exact_claim(raw, "d", "A")
    assert not await exact_claim(raw, "e", "A")  # what D may have written is A's, what B wrote is not
    said = [
        (fields[b"arithmetic"], fields.get(b"exact"))
        for _, fields in await read_raw_stream(raw, keys.reply("q", "r"))
        if fields[b"type"] == b"own"
    ]
    assert said == [(b"A", None), (b"B", None), (b"B", None), (b"B", None), (b"A", b"0"), (b"A", b"0")]


@pytest.mark.parametrize(("first", "second"), [("", "A"), ("A", "")])
async def test_a_worker_without_one_is_a_kind_of_its_own(raw: RedisClient, first: str, second: str) -> None:
    await write(raw, await try_claim(raw, "a", arithmetic=first))
    assert await exact_claim(raw, "b", first)
    assert not await exact_claim(raw, "c", second)


@pytest.mark.parametrize("theirs", ["A", ""])
async def test_a_reply_that_is_begun_is_left_to_its_arithmetic(raw: RedisClient, theirs: str) -> None:
    assert isinstance(await try_claim(raw, "a", digest="D", arithmetic=theirs), Claim)
    await write(raw, await try_claim(raw, "b", digest="D", arithmetic=theirs))
    before = await raw.hgetall(keys.state("q", "r"))
    left = await try_claim(raw, "c", digest="D", arithmetic="B")
    assert left == NotClaimed("other_arithmetic", digest="D", arithmetic=theirs)
    assert await raw.hgetall(keys.state("q", "r")) == before
    assert isinstance(await try_claim(raw, "d", digest="D", arithmetic=theirs), Claim)


@pytest.mark.parametrize("why", ["cancelled", "over", "asks for exact"])
async def test_another_arithmetic_that_only_ends_it_leaves_it_exact(raw: RedisClient, why: str) -> None:
    entry = await entry_since(raw, 10_000)
    await write(raw, await try_claim(raw, "a", entry=entry, arithmetic="A"))
    if why == "cancelled":
        await raw.set(keys.cancel("q", "r"), "1")
    how: dict[str, Any] = {"timeout_ms": 9_000} if why == "over" else {}
    how |= {"any_arithmetic": "end"} if why == "asks for exact" else {}
    for _ in range(2):  # that it was taken so makes it nobody else's
        last = await try_claim(raw, "b", entry=entry, arithmetic="B", **how)
        assert isinstance(last, Claim)
        assert (last.is_of_other_arithmetic, last.only_ends, last.is_exact) == (True, True, True)
    assert isinstance(last, Claim)
    assert await finish(raw, last) == b"ok"


async def test_one_that_is_inexact_waits_for_nobody(raw: RedisClient) -> None:
    await write(raw, await try_claim(raw, "a", arithmetic="A"))
    assert not await exact_claim(raw, "b", "B")
    again = await try_claim(raw, "c", arithmetic="C")
    assert isinstance(again, Claim)
    assert not again.is_exact


async def test_another_model_that_ends_a_reply_does_not_make_it_inexact(raw: RedisClient) -> None:
    await write(raw, await try_claim(raw, "a", digest="A", arithmetic="A"))
    last = await try_claim(raw, "b", digest="B", arithmetic="B", any_model=True)
    assert isinstance(last, Claim)
    assert last.is_exact
    assert await exact_claim(raw, "c", "A")


async def entry_since(redis: RedisClient, age_ms: int) -> str:
    """Returns an id of an entry that came `age_ms` ago."""
    seconds, micros = await redis.time()
    return f"{seconds * 1000 + micros // 1000 - age_ms}-1"


@pytest.mark.parametrize("why", ["cancelled", "over"])
async def test_what_is_over_is_taken_with_any_model(raw: RedisClient, why: str) -> None:
    """A worker takes it only to end it, so no worker with its own model has to come for that."""
    how: dict[str, Any] = {"entry": await entry_since(raw, 10_000), "digest": "B"}
    await write(raw, await try_claim(raw, "a", entry=how["entry"], digest="A"))
    assert await try_claim(raw, "b", timeout_ms=60_000, **how) == NotClaimed("other_model", digest="A")
    if why == "cancelled":
        await raw.set(keys.cancel("q", "r"), "1")
    found = await try_claim(raw, "b", timeout_ms=60_000 if why == "cancelled" else 9_000, **how)
    assert isinstance(found, Claim)
    assert (found.is_of_other_model, found.is_cancelled) == (True, why == "cancelled")


async def test_what_is_to_be_ended_and_goes_on_is_left_alone(raw: RedisClient) -> None:
    entry = await entry_since(raw, 10_000)
    for timeout_ms in (None, 60_000):
        found = await try_claim(raw, entry=entry, timeout_ms=timeout_ms, only_over=True)
        assert found == NotClaimed("goes_on")
    assert not await raw.exists(keys.state("q", "r"), keys.reply("q", "r"))
    assert isinstance(await try_claim(raw, entry=entry, timeout_ms=9_000, only_over=True), Claim)
    await raw.set(keys.cancel("q", "r"), "1")
    assert isinstance(await try_claim(raw, entry=entry, only_over=True), Claim)


@pytest.mark.parametrize(("first", "second"), [("", "B"), ("A", "")])
async def test_a_model_that_nothing_is_known_of_is_compared_with_none(
    raw: RedisClient, first: str, second: str
) -> None:
    await write(raw, await try_claim(raw, "a", digest=first))
    later = await try_claim(raw, "b", digest=second)
    assert isinstance(later, Claim)
    assert not later.is_of_other_model

"""On a real server, a claim makes the request this worker's, or removes its entry from the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis import exceptions

from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.protocol.wire import GenerateRequest, WireError
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.claiming import SUSPECT_STRIKES, Claimer, GoesOn, Occupied, Suspect
from penstock.worker.metrics import WorkerMetrics
from penstock.worker.publish.coalescing import Coalescing
from penstock.worker.publish.outbox import Outbox
from penstock.worker.publish.writes import AsideWrite, Burial, Write
from penstock.worker.run.entries import EntryReader, QueueEntry
from penstock.worker.run.requests import LiveRequest, RequestTable
from penstock.worker.threads import Threads
from tests.support.redis_servers.streams import add_entry, read_raw_stream

pytestmark = pytest.mark.every_server

STREAM, STATE, REPLY = keys.requests("q"), keys.state("q", "r"), keys.reply("q", "r")


class Desk:
    """A claimer at work, whose outbox the test looks at and nobody sends."""

    def __init__(self, raw: RedisClient, instance: str = "i", **config: Any) -> None:
        self.raw = raw
        self.config = WorkerConfig(queue="q", name="w", **config)
        self.aborted: list[str] = []
        self.metrics = WorkerMetrics()
        self.outbox = Outbox(
            self.config, RequestTable(self.aborted.append), Coalescing(0, 0, lambda _: None), has_nodes=False
        )
        self.threads = Threads()
        self.claimer = Claimer(raw, self.config, instance, self.threads, self.outbox, self.metrics)

    async def entry(self, **fields: str) -> QueueEntry:
        """Adds an entry and reads it from the queue."""
        await add_entry(self.raw, STREAM, {"prompt": "x", "id": "r", **fields})
        (entry,) = await EntryReader(self.raw, self.raw, self.config).take(1)
        return entry

    async def claim(self, entry: QueueEntry, *, alone: bool = False) -> LiveRequest:
        live = await self.claimer.claim(entry, alone=alone)
        assert live is not None
        assert self.outbox.requests.get(live.id) is live
        return live

    def writes(self) -> list[Write]:
        return self.outbox.collect(float("inf"))

    async def close(self) -> None:
        await self.claimer.close()
        self.threads.close()


@pytest.fixture
async def desk(raw: RedisClient) -> AsyncIterator[Desk]:
    desk = Desk(raw, max_body_bytes=1000)
    yield desk
    await desk.close()


@pytest.fixture
async def other(raw: RedisClient) -> AsyncIterator[Desk]:
    """A second process."""
    other = Desk(raw, "j")
    yield other
    await other.close()


async def test_a_request_becomes_this_worker_s(desk: Desk, raw: RedisClient) -> None:
    entry = await desk.entry(max_tokens="5")
    live = await desk.claim(entry)
    assert isinstance(live.asked, GenerateRequest)
    assert (live.id, live.entry_id, live.asked.max_tokens, live.queue) == ("r", entry.id, 5, "q")
    assert (live.claim.attempts, live.claim.has_journal) == (1, False)
    state = await raw.hgetall(STATE)
    assert (state[b"worker"], state[b"instance"], state[b"status"]) == (b"w", b"i", b"running")
    assert (desk.metrics.claims._value.get(), desk.metrics.resumed._value.get()) == (1, 0)
    assert desk.writes() == []


async def test_an_entry_without_an_id_is_claimed_under_its_own(desk: Desk, raw: RedisClient) -> None:
    entry_id = await add_entry(raw, STREAM, {"prompt": "x"})
    live = await desk.claim(QueueEntry(entry_id, {b"prompt": b"x"}, 7))
    assert live.id == entry_id


async def test_what_cannot_be_read_is_claimed_too_so_that_its_end_is_written_once(desk: Desk) -> None:
    live = await desk.claim(await desk.entry(max_tokens="many"))
    assert isinstance(live.asked, WireError)
    assert (live.id, live.asked.code) == ("r", "invalid_request")


async def test_a_body_over_the_limit_is_claimed_under_its_id(desk: Desk) -> None:
    live = await desk.claim(await desk.entry(prompt="x" * 2000))
    assert isinstance(live.asked, WireError)
    assert (live.id, live.asked.code, live.fields) == ("r", "too_large", {})


async def test_one_that_another_began_is_resumed(desk: Desk, other: Desk, raw: RedisClient) -> None:
    entry = await desk.entry()
    first = await other.claim(entry)
    second = await desk.claim(entry)
    assert second.claim.epoch > first.claim.epoch
    assert (second.claim.has_journal, second.claim.crashes, second.claim.strikes) == (True, 1, 1)
    assert desk.metrics.resumed._value.get() == 1
    assert (await raw.hget(STATE, "instance")) == b"i"


async def test_a_second_claim_by_the_same_process_fences_the_first(desk: Desk) -> None:
    """The process was frozen, lost the request, and has it back before it knew."""
    entry = await desk.entry()
    first, second = await desk.claim(entry), await desk.claim(entry)
    assert first.is_gone
    assert not second.is_gone
    assert desk.aborted == ["r"]
    assert desk.metrics.dropped.labels(reason="fenced")._value.get() == 1
    assert (second.claim.crashes, second.claim.strikes) == (0, 0)


async def test_of_two_entries_with_one_id_the_second_leaves(desk: Desk) -> None:
    live = await desk.claim(await desk.entry())
    second = await desk.entry()
    assert await desk.claimer.claim(second) is None
    assert desk.metrics.duplicates._value.get() == 1
    assert desk.outbox.leaving == {second.id}
    (write,) = desk.writes()
    assert keys.seen("q", "r") not in write.command  # the first has not ended
    assert not live.is_gone


async def test_the_second_entry_runs_if_the_first_was_deleted(desk: Desk, other: Desk, raw: RedisClient) -> None:
    first = await desk.entry()
    await other.claim(first)
    await raw.xdel(STREAM, first.id)
    second = await desk.entry()
    assert (await desk.claim(second)).entry_id == second.id
    assert await raw.hget(STATE, "entry") == second.id.encode()
    assert desk.metrics.duplicates._value.get() == 0


async def test_an_entry_that_was_deleted_while_pending_is_let_go_of_unclaimed(desk: Desk, raw: RedisClient) -> None:
    assert await desk.claimer.claim(QueueEntry("1-1", {}, 0)) is None
    assert desk.outbox.leaving == {"1-1"}
    assert not await raw.exists(keys.state("q", "1-1"))


async def test_one_that_has_ended_is_not_run_again(desk: Desk, other: Desk, raw: RedisClient) -> None:
    entry = await desk.entry()
    await end(other, await other.claim(entry), "done")
    assert await desk.claimer.claim(entry) is None
    (write,) = desk.writes()
    assert isinstance(write, AsideWrite)
    assert write.entry_ids == (entry.id,)
    assert keys.seen("q", "r") in write.command  # where it is marked, for clients that send its id again
    assert desk.metrics.duplicates._value.get() == 0


async def test_a_dead_one_without_its_letter_gets_one(desk: Desk, other: Desk) -> None:
    """The worker died between the end and the letter."""
    entry = await desk.entry()
    await end(other, await other.claim(entry), "dead")
    assert await desk.claimer.claim(entry) is None
    (letter,) = desk.writes()
    assert isinstance(letter, Burial)
    assert (letter.request_id, letter.entry_id, letter.code) == ("r", entry.id, "given_up")
    assert desk.metrics.dead_letters.labels(kind="request")._value.get() == 1


async def end(desk: Desk, live: LiveRequest, status: Any) -> None:
    command = scripts.finish(
        "q", "r", claim=live.claim, last_number=0, status=status, ttl_ms=10**6, entries=[(1, ["type", "end"])]
    )
    assert await desk.raw.execute_command(*command) == b"ok"


async def hold_highest_id(raw: RedisClient) -> None:
    await raw.xadd(REPLY, {"type": "chunk"}, id=f"{2**64 - 1}-1")


async def hold_string_as_reply(raw: RedisClient) -> None:
    await raw.set(REPLY, "x")


async def hold_string_as_state(raw: RedisClient) -> None:
    await raw.set(STATE, "x")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (hold_highest_id, b"nothing can be written after"),
        (hold_string_as_reply, b"hold what no worker writes there"),
        (hold_string_as_state, b"hold what no worker writes there"),
    ],
)
async def test_one_whose_keys_hold_something_else_is_given_up(
    desk: Desk, raw: RedisClient, spoil: Any, message: bytes
) -> None:
    entry = await desk.entry(keep_s="250000")
    await spoil(raw)
    assert await desk.claimer.claim(entry) is None
    told, letter = sorted(desk.writes(), key=lambda write: isinstance(write, Burial))
    assert isinstance(letter, Burial)
    assert (letter.request_id, letter.code, letter.is_malformed) == ("r", "reply_unwritable", False)
    assert message in b" ".join(part if isinstance(part, bytes) else str(part).encode() for part in letter.command)
    await raw.delete(REPLY)
    await raw.execute_command(*told.command)
    ((_, fields),) = await read_raw_stream(raw, REPLY)
    assert (fields[b"type"], fields[b"code"]) == (b"end", b"reply_unwritable")
    assert 240_000 < await raw.ttl(REPLY) <= 250_000
    assert desk.metrics.dead_letters.labels(kind="request")._value.get() == 1
    assert not len(desk.outbox.requests)


async def crash(raw: RedisClient, entry: QueueEntry, times: int) -> None:
    """Has `times` processes claim the entry and die."""
    for number in range(times):
        dying = Desk(raw, f"dead {number}")
        await dying.claim(entry, alone=True)
        await dying.close()


async def test_a_suspect_is_given_back_and_claimed_when_it_can_run_alone(desk: Desk, raw: RedisClient) -> None:
    entry = await desk.entry()
    await crash(raw, entry, SUSPECT_STRIKES)
    with pytest.raises(Suspect):
        await desk.claimer.claim(entry)
    assert await raw.hget(STATE, "status") == b"queued"  # so that it has no part in the crash of another suspect
    assert not len(desk.outbox.requests)
    assert desk.writes() == []
    live = await desk.claim(entry, alone=True)
    assert (live.claim.strikes, live.claim.crashes, live.claim.handbacks) == (SUSPECT_STRIKES, SUSPECT_STRIKES, 0)


async def test_one_with_too_many_strikes_is_claimed_to_be_ended(desk: Desk, raw: RedisClient) -> None:
    """That needs no run, so it need not wait until nothing else runs."""
    entry = await desk.entry()
    await crash(raw, entry, desk.config.max_attempts)
    assert (await desk.claim(entry)).claim.strikes == desk.config.max_attempts


@pytest.mark.parametrize("why", ["cancelled", "overdue", "unreadable"])
async def test_a_suspect_that_needs_no_run_does_not_wait_until_it_can_run_alone(
    desk: Desk, raw: RedisClient, why: str
) -> None:
    more = {"cancelled": {}, "overdue": {"timeout_s": "0.001"}, "unreadable": {"max_tokens": "many"}}
    entry = await desk.entry(**more[why])
    await crash(raw, entry, SUSPECT_STRIKES)
    if why == "cancelled":
        await raw.set(keys.cancel("q", "r"), 1)
    assert (await desk.claim(entry)).claim.strikes == SUSPECT_STRIKES


async def test_beside_a_suspect_nothing_runs_but_what_needs_no_run_ends(desk: Desk, raw: RedisClient) -> None:
    entry = await desk.entry()
    desk.outbox.requests.alone = "1-1"
    with pytest.raises(Occupied):
        await desk.claimer.claim(entry)
    assert await raw.hmget(STATE, "status", "handbacks") == [b"queued", b"0"]
    assert not len(desk.outbox.requests)
    await raw.set(keys.cancel("q", "r"), 1)
    assert (await desk.claim(entry)).claim.is_cancelled


async def test_what_is_to_be_ended_only_is_left_alone_where_it_goes_on(desk: Desk, raw: RedisClient) -> None:
    with pytest.raises(GoesOn):
        await desk.claimer.claim(await desk.entry(), only_over=True)
    assert not await raw.exists(STATE)
    live = await desk.claimer.claim(await desk.entry(id="s", max_tokens="many"), only_over=True)
    assert live is not None  # what cannot be read ends whenever it is looked at
    assert isinstance(live.asked, WireError)


async def test_claims_that_come_together_are_all_made(desk: Desk) -> None:
    entries = [await desk.entry(id=f"r{number}") for number in range(20)]
    lives = await asyncio.gather(*(desk.claim(entry) for entry in entries))
    assert [live.id for live in lives] == [f"r{number}" for number in range(20)]
    assert len(desk.outbox.requests) == 20


async def test_while_the_server_is_in_trouble_the_entry_stays(desk: Desk, raw: RedisClient) -> None:
    entry = await desk.entry()
    await raw.config_set("maxmemory", 1)
    try:
        with pytest.raises(exceptions.RedisError, match="maxmemory"):
            await desk.claimer.claim(entry)
    finally:
        await raw.config_set("maxmemory", 0)
    assert (len(desk.outbox.requests), desk.writes()) == (0, [])
    assert (await desk.claim(entry)).claim.attempts == 1


async def test_a_server_that_will_go_on_refusing_is_no_fault_of_the_request(redis_url: str, raw: RedisClient) -> None:
    await raw.execute_command("ACL", "SETUSER", "reader", "reset", "on", ">x", "~*", "+@read", "+@connection")
    reader = connect(redis_url.replace("//", "//reader:x@"), decode=False)
    desk = Desk(reader)
    try:
        with pytest.raises(exceptions.RedisError):
            await desk.claimer.claim(QueueEntry("1-1", {b"prompt": b"x"}, 7))
        assert desk.writes() == []
    finally:
        await desk.close()
        await reader.aclose()
        await raw.execute_command("ACL", "DELUSER", "reader")

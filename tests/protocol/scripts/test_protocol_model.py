"""The delivery protocol as a state machine: the real scripts on a real server, in any order hypothesis likes.

A worker here is what it remembers: the entries it was given and the claims it believes to have. A frozen worker goes on
believing; a crashed one has forgotten. The server may forget its last writes, as in a power cut or a failover. Then
each worker reconnects, in any order, and looks whether the server still knows what it wrote. After every step the
content of the streams is checked.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis import exceptions

from penstock.protocol import keys, scripts
from penstock.protocol.consumers import set_aside_for
from penstock.protocol.queue.enqueue import Added, enqueue
from penstock.protocol.redis.connection import RedisClient, connect, ensure_group
from penstock.protocol.redis.pipeline import Command
from penstock.protocol.redis.streams import stream_entries
from penstock.protocol.scripts import Claim, NotClaimed
from penstock.worker.publish import reconnect
from tests.support.redis_servers.clocks import ShiftedServer

pytestmark = pytest.mark.every_server

QUEUE = "q"
REQUESTS = ("a", "b", "c")
TRUTH = (11, 12, 13, 14, 15)  # what any worker generates for any request
TTL_MS = 10**13
BEAT_TTL_MS = 10_000
YEARS_S = 365 * 86_400
LIMITS = {"max_body_bytes": 1000, "max_bytes": 10**6}


def bill(entry_id: str) -> scripts.Bill:
    return scripts.Bill(entry_id, "", 1)


def flat(fields: dict[bytes, bytes]) -> list[bytes]:
    return [part for item in fields.items() for part in item]


worker_at = st.integers(0, 2)
request_ids = st.sampled_from(REQUESTS)


@dataclass
class Held:
    """A claim that a worker believes to have."""

    claim: Claim
    entry_id: str
    num_tokens: int
    next_number: int = 1
    last_append: Command | None = None
    last_finish: Command | None = None


@dataclass(frozen=True)
class Snapshot:
    """The server's content after a step, and the entries that the model knew."""

    keys: dict[bytes, bytes]
    entry_ids: dict[str, list[str]]


@dataclass
class Worker:
    name: str
    digest: str  # of its model
    entries: dict[str, str] = field(default_factory=dict)  # entries it was given, to the request's id
    held: dict[str, Held] = field(default_factory=dict)
    may_ack: set[str] = field(default_factory=set)
    must_reconnect: bool = False


class Protocol(RuleBasedStateMachine):
    server: ClassVar[ShiftedServer]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        if self.server.can_be_set:
            self.server.set_ahead(0)
        self.redis: RedisClient = connect(self.server.url, decode=False, retries=0)
        self.numbers = itertools.count()
        self.entry_ids: dict[str, list[str]] = {request_id: [] for request_id in REQUESTS}
        self.run(self.redis.flushall())
        self.run(ensure_group(self.redis, QUEUE))
        self.workers = [self.new_worker() for _ in range(3)]
        self.snapshots: list[Snapshot] = []

    def run(self, command: Any) -> Any:
        async def wait() -> Any:
            return await command

        return self.runner.run(wait())

    def send(self, command: Command) -> Any:
        return self.run(self.redis.execute_command(*command))

    def new_worker(self) -> Worker:
        number = next(self.numbers)
        worker = Worker(f"w{number}", "AAB"[number % 3])
        self.beat(worker)
        return worker

    def beat(self, worker: Worker) -> None:
        for consumer in (worker.name, set_aside_for(worker.digest)):
            value = f"{worker.name}/{BEAT_TTL_MS}"
            self.run(self.redis.set(keys.heartbeat(QUEUE, consumer), value, px=BEAT_TTL_MS))

    @initialize(max_tokens=st.integers(0, 3))
    def begin(self, max_tokens: int) -> None:
        """Begins with a claim, as most of interest comes after a first one."""
        self.enqueue("a")
        self.read(0)
        self.claim(0, 0)
        if max_tokens:
            self.append(0, "a", max_tokens)

    # What clients do.

    @rule(request_id=request_ids)
    def enqueue(self, request_id: str) -> None:
        """Enqueues a request, or enqueues it again as a client that retries."""
        answer = self.run(
            enqueue(
                self.redis.execute_command,
                QUEUE,
                request_id,
                {"id": request_id},
                max_length=None,
                dedupe_window_s=100 * YEARS_S,
            )
        )
        assert isinstance(answer, Added)
        assert answer.again == bool(self.entry_ids[request_id])
        if self.entry_ids[request_id]:
            assert answer.entry_id == self.entry_ids[request_id][0]
        else:
            self.entry_ids[request_id].append(answer.entry_id)

    @precondition(lambda self: any(self.entry_ids.values()))
    @rule(request_id=request_ids)
    def enqueue_by_hand(self, request_id: str) -> None:
        """Adds a second entry with the same id, by somebody who does without the script."""
        if len(self.entry_ids[request_id]) == 1:
            entry_id = self.run(self.redis.xadd(keys.requests(QUEUE), {"id": request_id}))
            self.entry_ids[request_id].append(entry_id.decode())

    @rule(request_id=request_ids)
    def cancel(self, request_id: str) -> None:
        self.run(self.redis.set(keys.cancel(QUEUE, request_id), "1"))

    # What befalls workers.

    @rule(at=worker_at)
    def crash(self, at: int) -> None:
        self.run(self.redis.delete(keys.heartbeat(QUEUE, self.workers[at].name)))
        self.workers[at] = self.new_worker()

    @rule(at=worker_at)
    def freeze(self, at: int) -> None:
        self.run(self.redis.delete(keys.heartbeat(QUEUE, self.workers[at].name)))

    @rule(at=worker_at)
    def wake(self, at: int) -> None:
        self.beat(self.workers[at])

    @rule(digest=st.sampled_from("AB"))
    def lose_a_model(self, digest: str) -> None:
        """Takes away a model: none of its workers has been there for a while."""
        self.run(self.redis.delete(keys.heartbeat(QUEUE, set_aside_for(digest))))

    # What befalls the server.

    @precondition(lambda self: self.server.can_be_set)
    @rule(ahead_s=st.integers(-90, 90) | st.integers(-40 * YEARS_S, 40 * YEARS_S))
    def step_the_clock(self, ahead_s: int) -> None:
        """Steps the clock by any amount: all that is kept for some time may lapse at once, or stay."""
        self.server.set_ahead(ahead_s)

    @precondition(lambda self: len(self.snapshots) > 1)
    @rule(num_steps=st.integers(1, 6))
    def lose_the_last_writes(self, num_steps: int) -> None:
        """Sets the keys back to what they were some steps ago, and ends all connections."""
        del self.snapshots[max(1, len(self.snapshots) - num_steps) :]
        self.restore(self.snapshots[-1])

    @precondition(lambda self: self.snapshots and self.unended())
    @rule(count=st.integers(1, 2), pick=st.integers(0, 9), wakes_first=st.booleans())
    def lose_a_claim(self, count: int, pick: int, wakes_first: bool) -> None:
        """Loses a claim, and what its owner wrote while frozen; another worker claims the request, and both go on."""
        request_id = self.unended()[pick % len(self.unended())]
        for at in (0, 1):
            self.take_over(at)
            self.append(at, request_id, count)
            if at == 0:
                self.restore(self.snapshots[-1])
        for at in (0, 1) if wakes_first else (1, 0):
            self.append(at, request_id, 1)
            self.append_again(at, request_id)

    def unended(self) -> list[str]:
        return [each for each in REQUESTS if self.entry_ids[each] and not self.has_ended(each)]

    def restore(self, snapshot: Snapshot) -> None:
        self.run(self.redis.flushall())
        for key, value in snapshot.keys.items():
            self.run(self.redis.restore(key, 0, value))
        self.entry_ids = {request_id: list(ids) for request_id, ids in snapshot.entry_ids.items()}
        alive = {keys.heartbeat(QUEUE, worker.name).encode() for worker in self.workers}
        for key in snapshot.keys.keys() - alive:
            if b":worker:" in key:  # would expire by itself
                self.run(self.redis.delete(key))
        for worker in self.workers:
            worker.must_reconnect = True

    def acting(self, at: int) -> Worker:
        """Returns the worker, once it has looked at what a newly connected server remembers."""
        worker = self.workers[at]
        if worker.must_reconnect:
            worker.must_reconnect = False
            self.look_again(worker)
        return worker

    def look_again(self, worker: Worker) -> None:
        worker.may_ack.clear()  # the ends they stand for may be lost
        for request_id, held in list(worker.held.items()):
            live: Any = SimpleNamespace(claim=held.claim, reply=SimpleNamespace(last_number=held.next_number - 1))
            newest = scripts.parse_standing(self.send(scripts.newest(QUEUE, request_id)))
            if reconnect.judge(live, newest) is not None:
                del worker.held[request_id]
        self.give(worker, scripts.pending(QUEUE, worker=worker.name, count=100, after="0-0", **LIMITS))

    # What workers do, whether they live or are taken for dead.

    @rule(at=worker_at)
    def read(self, at: int) -> None:
        worker = self.acting(at)
        self.take(worker, count=1)

    @rule(at=worker_at)
    def read_oldest(self, at: int) -> None:
        worker = self.acting(at)
        self.take(worker, count=2, max_overtakes=0)

    def take(self, worker: Worker, **how: int) -> None:
        command = scripts.take(QUEUE, worker=worker.name, kinds=(worker.digest, ""), **how, **LIMITS)
        self.note(worker, self.send(command)[0])

    @rule(at=worker_at)
    def read_past_lanes(self, at: int) -> None:
        """Reads as an idle worker does, and as all did before there were lanes."""
        worker = self.acting(at)
        answer = self.run(self.redis.xreadgroup(keys.GROUP, worker.name, {keys.requests(QUEUE): ">"}, count=1))
        for _, entries in stream_entries(answer):
            self.note(worker, [(entry_id, 0, 1, flat(fields)) for entry_id, fields in entries])

    @rule(at=worker_at)
    def sweep(self, at: int) -> None:
        worker = self.acting(at)
        entries, has_new, _ = self.send(scripts.sweep(QUEUE, worker=worker.name, count=2, **LIMITS))
        self.note(worker, entries)
        assert not has_new

    @rule(request_id=request_ids)
    def note_cancelled(self, request_id: str) -> None:
        self.run(self.redis.sadd(keys.cancelled(QUEUE), request_id))

    @rule(key=st.sampled_from([keys.lane(QUEUE), keys.band(QUEUE, 0), keys.bands(QUEUE), keys.service(QUEUE)]))
    def delete_lanes(self, key: str) -> None:
        """Deletes lanes by hand: they are only an index."""
        self.run(self.redis.delete(key))

    def give(self, worker: Worker, command: Command) -> None:
        self.note(worker, self.send(command))

    def note(self, worker: Worker, entries: list[Any]) -> None:
        for entry_id, _, _, fields in entries:
            if fields:
                worker.entries[entry_id.decode()] = fields[1].decode()

    @rule()
    def reclaim_waiting(self) -> None:
        """Reclaims as a worker does that knows of no lanes: the entries that lanes hold are nobody's, and lanes keep
        their places.
        """
        self.give_up_as_before(entry_id for entry_id, owner in self.pending().items() if owner == keys.WAITING)

    @rule(at=worker_at)
    def adopt_as_before(self, at: int) -> None:
        """Takes unowned entries as a worker does whose lanes keep no place for returned entries."""
        worker = self.acting(at)
        unowned = [entry_id for entry_id, owner in self.pending().items() if owner == keys.UNOWNED]
        if unowned:
            found = self.run(self.redis.xclaim(keys.requests(QUEUE), keys.GROUP, worker.name, 0, [*unowned[:2]]))
            self.note(worker, [(entry_id, 0, 1, flat(fields)) for entry_id, fields in found])

    def give_up_as_before(self, entry_ids: Iterable[str]) -> None:
        if ids := list(entry_ids):
            self.run(self.redis.xclaim(keys.requests(QUEUE), keys.GROUP, keys.UNOWNED, 0, [*ids], justid=True))

    @rule()
    def reclaim(self) -> None:
        consumers = self.run(self.redis.xinfo_consumers(keys.requests(QUEUE), keys.GROUP))
        names = sorted({consumer["name"].decode() for consumer in consumers} - set(keys.HOLDERS))
        if names:
            lapsed = [names[place - 1] for place in self.send(scripts.lapsed(QUEUE, names))]
            lives = [self.run(self.redis.pttl(keys.heartbeat(QUEUE, name))) for name in names if name not in lapsed]
            assert all(left_ms <= BEAT_TTL_MS for left_ms in lives), "a heartbeat that outlives its time to live"
        for name in names:
            self.send(scripts.retire(QUEUE, stream=keys.requests(QUEUE), consumer=name, count=10))

    @precondition(lambda self: any(worker.entries for worker in self.workers))
    @rule(at=worker_at, pick=st.integers(0, 9))
    def claim(self, at: int, pick: int) -> None:
        worker = self.acting(at)
        if not worker.entries:
            return
        entry_id = sorted(worker.entries)[pick % len(worker.entries)]
        self.claim_entry(worker, entry_id)

    @rule(at=worker_at)
    def take_over(self, at: int) -> None:
        """Takes all others for dead; they go on without knowing it."""
        for other in self.workers:
            if other is not self.workers[at]:
                self.run(self.redis.delete(keys.heartbeat(QUEUE, other.name)))
        self.reclaim()
        self.take(self.workers[at], count=2)
        for entry_id in sorted(self.workers[at].entries):
            self.claim_entry(self.workers[at], entry_id)

    def claim_entry(self, worker: Worker, entry_id: str) -> None:
        request_id = worker.entries[entry_id]
        before = self.reply(request_id)
        has_ended = self.has_ended(request_id)
        is_another = has_ended or entry_id != self.first_claimed(request_id, entry_id)
        answer, gone_entry = self.try_claim(worker, entry_id), ""
        if isinstance(answer, NotClaimed) and answer.reason == "duplicate" and not self.exists(answer.other_entry):
            gone_entry = answer.other_entry
            answer = self.try_claim(worker, entry_id, gone_entry=gone_entry)
        is_of_other = not is_another and begun_with(before) not in (None, worker.digest)
        if is_of_other and self.run(self.redis.exists(keys.cancel(QUEUE, request_id))):
            assert isinstance(answer, Claim)  # any worker may end it
            assert answer.is_of_other_model
        elif is_of_other:
            assert answer == NotClaimed("other_model", digest=str(begun_with(before)))
            command = scripts.set_aside(QUEUE, worker=worker.name, entry_id=entry_id, kind=answer.digest)
            if self.send(command):
                del worker.entries[entry_id]
                return
            answer = self.try_claim(worker, entry_id, gone_entry=gone_entry, any_model=True)
        assert isinstance(answer, Claim) != is_another
        if isinstance(answer, Claim):
            tokens = sum(len(fields[b"tokens"].split(b",")) for _, fields in before if fields[b"type"] == b"chunk")
            worker.held[request_id] = Held(answer, entry_id, tokens)
        else:
            worker.may_ack.add(entry_id)

    def try_claim(
        self, worker: Worker, entry_id: str, *, gone_entry: str = "", any_model: bool = False
    ) -> Claim | NotClaimed:
        command = scripts.claim(
            QUEUE,
            worker.entries[entry_id],
            entry_id=entry_id,
            worker=worker.name,
            instance=worker.name,
            ttl_ms=TTL_MS,
            gone_entry=gone_entry,
            digest=worker.digest,
            any_model=any_model,
        )
        return scripts.parse_claim(self.send(command), worker.name)

    def first_claimed(self, request_id: str, default: str) -> str:
        """Returns the one entry whose claims count, unless the server has forgotten that it was enqueued."""
        entry = self.run(self.redis.hget(keys.state(QUEUE, request_id), "entry"))
        return str(entry.decode()) if entry is not None and self.exists(entry.decode()) else default

    def exists(self, entry_id: str) -> bool:
        return bool(self.run(self.redis.xrange(keys.requests(QUEUE), entry_id, entry_id)))

    @rule(at=worker_at, request_id=request_ids, count=st.integers(1, 2))
    def append(self, at: int, request_id: str, count: int) -> None:
        held = self.acting(at).held.get(request_id)
        if held is None or held.claim.is_of_other_model or held.num_tokens + count >= len(TRUTH):
            return
        new_id = f"{held.claim.epoch}-{held.next_number}"
        chunk = self.chunk(held.num_tokens, count)
        held.last_append = ("XADD", keys.reply(QUEUE, request_id), "NOMKSTREAM", new_id, *chunk)
        is_owner = self.owns(held, request_id)
        assert self.try_append(held.last_append) == is_owner
        if is_owner:
            held.num_tokens += count
            held.next_number += 1

    @rule(at=worker_at, request_id=request_ids)
    def append_again(self, at: int, request_id: str) -> None:
        """Sends a pipeline whose answer was lost again, as it was."""
        held = self.acting(at).held.get(request_id)
        if held is not None and held.last_append is not None:
            assert not self.try_append(held.last_append)

    @rule(at=worker_at, request_id=request_ids)
    def finish(self, at: int, request_id: str) -> None:
        worker = self.acting(at)
        held = worker.held.get(request_id)
        if held is None:
            return
        rest = len(TRUTH) - held.num_tokens
        reason, entries = "length", [self.chunk(held.num_tokens, rest)]
        if held.claim.is_cancelled:
            reason, entries = "cancelled", []
        elif held.claim.is_of_other_model:
            reason, entries = "error", []
        entries.append(["type", "end", "finish_reason", reason])
        numbered = list(enumerate(entries, start=held.next_number))
        held.last_finish = scripts.finish(
            QUEUE,
            request_id,
            claim=held.claim,
            last_number=held.next_number - 1,
            status="done",
            ttl_ms=TTL_MS,
            entries=numbered,
        )
        is_owner = self.owns(held, request_id)
        answer = self.send(held.last_finish)
        assert (answer == b"ok") == is_owner
        if answer in (b"ok", b"already"):
            worker.may_ack.add(held.entry_id)

    @rule(at=worker_at, request_id=request_ids)
    def finish_again(self, at: int, request_id: str) -> None:
        """Finishes again, or for the first time as far as the server knows."""
        held = self.acting(at).held.get(request_id)
        if held is not None and held.last_finish is not None:
            is_owner = self.owns(held, request_id)
            expected = (b"ok", b"lost") if is_owner else (b"already", b"fenced")
            assert self.send(held.last_finish) in expected

    # The same by those that have lost the request and do not know it: chance alone would rarely get there.

    @precondition(lambda self: self.zombies())
    @rule(pick=st.integers(0, 9))
    def zombie_append(self, pick: int) -> None:
        zombies = self.zombies()
        self.append(*zombies[pick % len(zombies)], 1)

    @precondition(lambda self: self.zombies())
    @rule(pick=st.integers(0, 9))
    def zombie_finish(self, pick: int) -> None:
        zombies = self.zombies()
        self.finish(*zombies[pick % len(zombies)])

    @precondition(lambda self: self.zombies())
    @rule(pick=st.integers(0, 9))
    def zombie_acknowledge(self, pick: int) -> None:
        zombies = self.zombies()
        self.acknowledge_for_others(*zombies[pick % len(zombies)])

    @precondition(lambda self: self.zombies())
    @rule(pick=st.integers(0, 9))
    def zombie_hand_back(self, pick: int) -> None:
        zombies = self.zombies()
        self.hand_back(*zombies[pick % len(zombies)])

    @precondition(lambda self: self.zombies())
    @rule(pick=st.integers(0, 9))
    def zombie_give_way(self, pick: int) -> None:
        zombies = self.zombies()
        self.give_way(*zombies[pick % len(zombies)])

    @rule(at=worker_at)
    def acknowledge(self, at: int) -> None:
        worker = self.acting(at)
        self.send(scripts.ack(QUEUE, worker=worker.name, bills=map(bill, sorted(worker.may_ack))))

    @rule(at=worker_at, request_id=request_ids)
    def acknowledge_for_others(self, at: int, request_id: str) -> None:
        """Acknowledges as a worker that has lost its entry without knowing: it can't acknowledge its successor's."""
        held = self.acting(at).held.get(request_id)
        if held is None:
            return
        pending = self.pending()
        if pending.get(held.entry_id) not in (None, self.workers[at].name):
            assert self.send(scripts.ack(QUEUE, worker=self.workers[at].name, bills=[bill(held.entry_id)])) == 0

    @rule(at=worker_at, request_id=request_ids)
    def hand_back(self, at: int, request_id: str) -> None:
        worker = self.acting(at)
        held = worker.held.pop(request_id, None)
        if held is not None:
            self.send(scripts.return_request(QUEUE, request_id, epoch=held.claim.epoch, handbacks=1))
            self.send(scripts.put_back(QUEUE, worker=worker.name, entry_ids=[held.entry_id]))

    @rule(at=worker_at, request_id=request_ids)
    def hand_back_as_before(self, at: int, request_id: str) -> None:
        worker = self.acting(at)
        held = worker.held.pop(request_id, None)
        if held is not None and self.pending().get(held.entry_id) == worker.name:
            self.send(scripts.return_request(QUEUE, request_id, epoch=held.claim.epoch, handbacks=1))
            self.give_up_as_before([held.entry_id])

    @rule(at=worker_at, request_id=request_ids)
    def give_way(self, at: int, request_id: str) -> None:
        """Gives way to a higher priority: the entry waits again."""
        worker = self.acting(at)
        held = worker.held.pop(request_id, None)
        if held is not None:
            is_owned = self.pending().get(held.entry_id) == worker.name
            self.send(scripts.return_request(QUEUE, request_id, epoch=held.claim.epoch, handbacks=1))
            _, put = self.send(scripts.put_back(QUEUE, worker=worker.name, entry_ids=[held.entry_id]))
            assert put == (is_owned and self.exists(held.entry_id))

    @rule(at=worker_at, pick=st.integers(0, 9))
    def pass_on(self, at: int, pick: int) -> None:
        """Leaves what a worker has read and not claimed to others."""
        worker = self.acting(at)
        entries = sorted(worker.entries)
        if not entries:
            return
        entry_id = entries[pick % len(entries)]
        is_owned = self.pending().get(entry_id) == worker.name
        command = scripts.pass_on(QUEUE, worker=worker.name, entry_id=entry_id, lowest=1000, room=1)
        is_passed = bool(self.send(command))
        assert is_passed == (is_owned and self.exists(entry_id))
        if is_passed:
            del worker.entries[entry_id]

    # What must always hold.

    @invariant()
    def remember(self) -> None:
        """Takes a snapshot for `lose_the_last_writes`."""
        names = self.run(self.redis.keys("*"))
        found = {name: self.run(self.redis.dump(name)) for name in names}
        self.snapshots.append(Snapshot(found, {request_id: list(ids) for request_id, ids in self.entry_ids.items()}))

    @invariant()
    def replies_are_whole(self) -> None:
        for request_id in REQUESTS:
            tokens: list[int] = []
            epoch, ended = 0, False
            for entry_id, fields in self.reply(request_id):
                assert not ended, "something follows the end"
                entry_epoch, number = map(int, entry_id.split(b"-"))
                kind = fields[b"type"]
                if kind == b"own":
                    assert entry_epoch > epoch
                    assert number == 0
                    epoch = entry_epoch
                else:
                    assert entry_epoch == epoch
                    ended = kind == b"end"
                if kind == b"chunk":
                    assert int(fields[b"offset"]) == len(tokens)
                    tokens += map(int, fields[b"tokens"].split(b","))
            assert tuple(tokens) == TRUTH[: len(tokens)]
            assert len(models(self.reply(request_id))) <= 1, "another model went on with a reply"
            if ended and fields[b"finish_reason"] == b"length":
                assert len(tokens) == len(TRUTH)

    @invariant()
    def nothing_is_lost(self) -> None:
        """Checks that a request whose reply has not ended has an entry that somebody will be given."""
        pending = self.pending()
        unread = self.unread()
        for request_id, entry_ids in self.entry_ids.items():
            if entry_ids and not self.has_ended(request_id):
                claimable = {self.first_claimed(request_id, entry_id) for entry_id in entry_ids}
                assert claimable & (pending.keys() | unread), f"nobody will ever run {request_id}"

    def teardown(self) -> None:
        """Lets one live worker bring everything to its end."""
        for worker in self.workers:
            for consumer in (worker.name, set_aside_for(worker.digest)):
                self.run(self.redis.delete(keys.heartbeat(QUEUE, consumer)))
        self.workers = [self.new_worker()]
        heir = self.workers[0]
        for _ in range(6):
            self.reclaim()
            self.sweep(0)
            self.take(heir, count=2)
            for entry_id in sorted(heir.entries):
                self.claim_entry(heir, entry_id)
                self.finish(0, heir.entries[entry_id])
            self.acknowledge(0)
        self.replies_are_whole()
        for request_id, entry_ids in self.entry_ids.items():
            if entry_ids:
                assert self.has_ended(request_id)
        assert self.run(self.redis.xlen(keys.requests(QUEUE))) == 0
        assert self.pending() == {}
        self.run(self.redis.aclose())
        self.runner.close()

    # Looking.

    def reply(self, request_id: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return list(self.run(self.redis.xrange(keys.reply(QUEUE, request_id))))

    def pending(self) -> dict[str, str]:
        found = self.run(self.redis.xpending_range(keys.requests(QUEUE), keys.GROUP, "-", "+", 100))
        return {item["message_id"].decode(): item["consumer"].decode() for item in found}

    def unread(self) -> set[str]:
        (group,) = self.run(self.redis.xinfo_groups(keys.requests(QUEUE)))
        start = f"({group['last-delivered-id'].decode()}"
        return {entry_id.decode() for entry_id, _ in self.run(self.redis.xrange(keys.requests(QUEUE), start, "+"))}

    def zombies(self) -> list[tuple[int, str]]:
        """Returns (worker, request) where the request runs elsewhere."""
        return [
            (at, request_id)
            for at, worker in enumerate(self.workers)
            for request_id, held in worker.held.items()
            if not (self.owns(held, request_id) or self.has_ended(request_id))
        ]

    def owns(self, held: Held, request_id: str) -> bool:
        reply = self.reply(request_id)
        return bool(reply) and not self.has_ended(request_id) and int(reply[-1][0].split(b"-")[0]) == held.claim.epoch

    def has_ended(self, request_id: str) -> bool:
        reply = self.reply(request_id)
        return bool(reply) and reply[-1][1][b"type"] == b"end"

    def try_append(self, command: Command) -> bool:
        try:
            return self.send(command) is not None
        except exceptions.ResponseError as error:
            assert "equal or smaller" in str(error)  # noqa: PT017
            return False

    @staticmethod
    def chunk(start: int, count: int) -> list[str]:
        tokens = ",".join(map(str, TRUTH[start : start + count]))
        return ["type", "chunk", "index", "0", "offset", str(start), "text", "", "tokens", tokens]


def models(reply: list[tuple[bytes, dict[bytes, bytes]]]) -> set[str]:
    """Returns the digests of the models that wrote chunks."""
    found, digest = set(), ""
    for _, fields in reply:
        digest = fields[b"digest"].decode() if fields[b"type"] == b"own" else digest
        if fields[b"type"] == b"chunk":
            found.add(digest)
    return found


def begun_with(reply: list[tuple[bytes, dict[bytes, bytes]]]) -> str | None:
    return next(iter(models(reply)), None)


def test_protocol(shifted_server: ShiftedServer) -> None:
    class Here(Protocol):
        server = shifted_server

    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Here, settings=settings(max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=checks)
    )

"""Puts real requests into each of the states in which requests wait, and holds them there."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from penstock.engine.loading.identity import Identity
from penstock.engine.stats import EngineInfo
from penstock.engine.text.conversation import Conversation, EncodedChat
from penstock.engine.text.fewest_tokens import Check, let_pass
from penstock.producer import AsyncClient
from penstock.protocol import keys, scripts
from penstock.protocol.consumers import kind_of, set_aside_for
from penstock.protocol.queue.cancelling import cancel
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine, FakeText, expected_tokens
from penstock.worker.card import make_card
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.claiming import Claimer
from penstock.worker.intake.waiting import WaitingState as State
from penstock.worker.run.entries import EntryReader, QueueEntry
from tests.support.observed import INFO
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import (
    Running,
    add_chunk,
    read_reply,
    read_until,
    running_worker,
    send,
    take_and_claim,
)
from tests.support.redis_servers.redis_proxy import RedisProxy
from tests.support.redis_servers.streams import read_stream

IDS = ("library", "by-hand")  # who sent them; both have an id of their own
NUM_TOKENS = 4
LONG_S = 1000.0
LONG_MS = 1_000_000
OLD, NEW = (Identity(revision=None, weights=weights, tokenizer="t", template=None) for weights in ("old", "new"))
ALIKE, OTHER = (replace(INFO, arithmetic=digit * 16) for digit in "ab")


class Engine(FakeEngine):
    """A fake engine that may preempt requests: they get no token until they are resumed."""

    preempted: frozenset[str] = frozenset()

    def step(self) -> list[Any]:
        rows, away = self._rows, [row for row in self._rows if row.request.id in self.preempted and row.ended is None]
        self._rows = [row for row in rows if row not in away]
        if away and not self._rows:
            time.sleep(0.001)  # a device that waits
        outputs = super().step()
        self._rows += away
        return outputs


class Blocked:
    """Work in a worker's threads that takes as long as the stage says."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.may_go_on = threading.Event()

    def wait(self) -> None:
        self.num_begun += 1
        assert self.may_go_on.wait(WAIT_S)


class SlowText(FakeText):
    def __init__(self, blocked: Blocked) -> None:
        self._blocked = blocked

    def encode_chat(self, chat: Conversation, check: Check = let_pass) -> EncodedChat:
        self._blocked.wait()
        return super().encode_chat(chat, check)


class SlowGrammars:
    def __init__(self, blocked: Blocked) -> None:
        self._blocked = blocked

    def compile(self, source: str) -> Any:
        self._blocked.wait()


class Stage:
    """Shared by all scenes: a server, a client, workers, and what the two requests ask for."""

    def __init__(self, url: str, redis: RedisClient, client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.url = url
        self.redis = redis
        self.client = client
        self.monkeypatch = monkeypatch
        self.fields: dict[str, Any] = {}
        self.engines: list[Engine] = []
        self.sweeps = 0
        self.may_sweep = asyncio.Event()
        self.may_sweep.set()
        self.acts: Callable[[], object] | None = None  # ends what nothing can act in
        self.prompt = "library"
        self.num_tokens = 0
        self._releases: list[Callable[[], object]] = [self.may_sweep.set]
        self._watch_sweeps()

    def _watch_sweeps(self) -> None:
        sweep = EntryReader.sweep

        async def counted(reader: EntryReader) -> Any:
            await self.may_sweep.wait()
            self.sweeps += 1
            return await sweep(reader)

        self.monkeypatch.setattr(EntryReader, "sweep", counted)

    def release(self) -> None:
        """Releases the requests from whatever holds them in their state."""
        for engine in self.engines:
            engine.preempted = frozenset()
            engine.allow()
        for release in self._releases:
            release()

    async def let_act(self) -> None:
        """Lets Redis come back or answer."""
        if self.acts is not None and asyncio.iscoroutine(acted := self.acts()):
            await acted

    async def is_late(self) -> bool:
        """Checks by the server's clock whether the requests' time is over."""
        seconds, _ = await self.redis.time()
        [*_, (last, _)] = await read_stream(self.redis, keys.requests("q"))
        return bool(seconds > int(last.split("-")[0]) / 1000 + self.fields["timeout_s"])

    def on_release(self, release: Callable[[], object]) -> None:
        self._releases.append(release)

    async def add(self, request_id: str, **more: Any) -> None:
        fields = {"max_tokens": NUM_TOKENS, **self.fields, **more}
        self.num_tokens = fields["max_tokens"]
        if not {"messages", "prompt"} & fields.keys():
            fields["prompt"] = request_id
        if request_id == "by-hand":
            texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
            await send(self.redis, id=request_id, **texts)
        else:
            prompt = fields.pop("messages", None) or fields.pop("prompt")
            await self.client.submit(prompt, id=request_id, **fields)

    async def add_both(self, **more: Any) -> None:
        for request_id in IDS:
            await self.add(request_id, **more)

    @asynccontextmanager
    async def worker(
        self, slots: int, *, is_held: bool = True, url: str = "", **options: Any
    ) -> AsyncIterator[Running]:
        engine = Engine(max_num_seqs=slots)
        self.engines.append(engine)
        if is_held:
            engine.hold()
        options = {"suspect_wait_s": LONG_S, "steal_after_ms": LONG_MS, **options}
        async with running_worker(url or self.url, engine, **options) as running:
            try:
                yield running
            finally:
                self.release()

    @asynccontextmanager
    async def full_worker(self, **options: Any) -> AsyncIterator[Running]:
        """Runs a worker that is full until the release, for requests of every priority."""
        async with self.worker(1, **options) as running:
            await self.fill()
            yield running

    async def fill(self) -> None:
        await send(self.redis, id="first", prompt="x", max_tokens=1, priority=1000)
        await self.prefilled("first")

    @property
    def ran(self) -> list[str]:
        return [request_id for engine in self.engines for request_id in engine.prefilled]

    async def prefilled(self, *request_ids: str) -> None:
        await eventually(lambda: set(request_ids) <= set(self.ran))

    async def held_by(self, consumer: str, *request_ids: str) -> None:
        """Waits until the entries of both requests, or of others, are pending for `consumer` or have ended."""
        await eventually(lambda: self._are_held_by(consumer, request_ids or IDS))

    async def _are_held_by(self, consumer: str, request_ids: Sequence[str]) -> bool:
        pending = await self.redis.xpending_range(keys.requests("q"), keys.GROUP, "-", "+", 100, consumer)
        held = {str(each["message_id"]) for each in pending}
        entries = await read_stream(self.redis, keys.requests("q"))
        there = {fields.get("id"): entry for entry, fields in entries}
        return all([there.get(each) in held or await self.has_ended(each) for each in request_ids])

    async def has_ended(self, request_id: str) -> bool:
        entries = await read_stream(self.redis, keys.reply("q", request_id))
        return bool(entries) and entries[-1][1].get("type") == "end"

    async def ended(self, request_id: str) -> str:
        return (await read_reply(self.redis, request_id)).end.finish_reason

    async def cancel(self, request_id: str) -> None:
        await cancel(self.redis, "q", request_id)


Scene: TypeAlias = Callable[[Stage], AbstractAsyncContextManager[None]]
SCENES: dict[State, Scene] = {}


def scene(state: State) -> Callable[[Callable[[Stage], AsyncIterator[None]]], None]:
    def add(function: Callable[[Stage], AsyncIterator[None]]) -> None:
        SCENES[state] = asynccontextmanager(function)

    return add


@scene(State.NEW)
async def new(stage: Stage) -> AsyncIterator[None]:
    async with stage.full_worker():
        stage.may_sweep.clear()
        await stage.add_both()
        stage.acts = stage.may_sweep.set
        yield


@scene(State.IN_LANE)
async def in_lane(stage: Stage) -> AsyncIterator[None]:
    async with stage.full_worker():
        await stage.add_both()
        await stage.held_by(keys.WAITING)
        yield


@scene(State.AT_HOME)
async def at_home(stage: Stage) -> AsyncIterator[None]:
    """The home says that it has room and takes nothing."""
    async with stage.worker(1, name="away"):
        await stage.add_both(affinity=await _home_elsewhere(stage, "probe"))
        await stage.held_by(keys.WAITING)
        yield


async def _home_elsewhere(stage: Stage, name: str) -> str:
    """Returns a beginning of prompts that is at home with another worker than `name`."""
    redis = stage.redis
    other = scripts.beat(
        "q", worker="home", instance="i", ttl_ms=LONG_MS, is_serving=True, must_match=False, card={}, model_ttl_ms=1
    )
    await redis.execute_command(*other)
    await redis.zadd(keys.room("q"), {"home": 9})
    stage.on_release(lambda: asyncio.ensure_future(redis.zadd(keys.room("q"), {"home": 0})))
    for number in range(64):
        probe = await send(redis, prompt="x", max_tokens=1, affinity=f"a{number}")
        command = scripts.take("q", worker=name, count=1, max_body_bytes=10**6, max_bytes=10**6, steal_after_ms=LONG_MS)
        taken, *_ = await redis.execute_command(*command)
        await redis.xack(keys.requests("q"), keys.GROUP, probe)
        await redis.xdel(keys.requests("q"), probe)
        if not taken:
            return f"a{number}"
    raise AssertionError(f"all beginnings are at home with {name}")


@scene(State.ORPHANED)
async def orphaned(stage: Stage) -> AsyncIterator[None]:
    async with stage.full_worker():
        stage.may_sweep.clear()
        await stage.redis.set(keys.heartbeat("q", "dead"), "i", px=700)
        for request_id in IDS:
            await stage.add(request_id)
            await take_and_claim(stage.redis, "dead", request_id)
        stage.may_sweep.set()
        yield


@scene(State.UNOWNED)
async def unowned(stage: Stage) -> AsyncIterator[None]:
    """A worker from before lanes gave the entries back."""
    async with stage.full_worker():
        stage.may_sweep.clear()
        await stage.redis.set(keys.heartbeat("q", "old"), "i", px=LONG_MS)
        for request_id in IDS:
            await stage.add(request_id)
            claim = await take_and_claim(stage.redis, "old", request_id)
            await stage.redis.execute_command(*scripts.return_request("q", request_id, epoch=claim.epoch, handbacks=1))
        pending = await stage.redis.xpending_range(keys.requests("q"), keys.GROUP, "-", "+", 9, "old")
        entries = [each["message_id"] for each in pending]
        await stage.redis.xclaim(keys.requests("q"), keys.GROUP, keys.UNOWNED, 0, [*entries], justid=True)
        stage.may_sweep.set()
        yield


@scene(State.SET_ASIDE)
async def set_aside(stage: Stage) -> AsyncIterator[None]:
    """The replies were begun by a model that no worker here has; a moment ago one had it."""
    aside = set_aside_for(OLD.digest(None))
    for request_id in IDS:
        await stage.add(request_id)
        await take_and_claim(stage.redis, "dead", request_id, digest=OLD.digest(None))
        await add_chunk(stage.redis, request_id, 1, 0, expected_tokens(request_id.encode(), request_id, 0, 1))
    await stage.redis.set(keys.heartbeat("q", aside), "dead", px=LONG_MS)
    async with stage.worker(1, identity=NEW, name="new"):
        await stage.held_by(aside)
        await stage.fill()
        yield


@scene(State.LEFT_ALIKE)
async def left_alike(stage: Stage) -> AsyncIterator[None]:
    """The replies were begun by another arithmetic, which a worker had a moment ago, and go on with no other."""
    kind = kind_of("", arithmetic_of(ALIKE))
    for request_id in IDS:
        await stage.add(request_id, exact=True)
        await take_and_claim(stage.redis, "dead", request_id, arithmetic=arithmetic_of(ALIKE))
        await add_chunk(stage.redis, request_id, 1, 0, expected_tokens(request_id.encode(), request_id, 0, 1))
    await stage.redis.set(keys.heartbeat("q", set_aside_for(kind)), "dead", px=LONG_MS)
    async with stage.worker(1, info=OTHER, name="new"):
        await stage.held_by(set_aside_for(kind))
        await stage.fill()
        yield


def arithmetic_of(info: EngineInfo) -> str:
    """Returns the arithmetic that the card of a worker with this engine names."""
    return make_card("", WorkerConfig(), info, None, None).arithmetic or ""


@scene(State.SUSPECT)
async def suspect(stage: Stage) -> AsyncIterator[None]:
    async with stage.worker(4):
        await send(stage.redis, id="first", prompt="x", max_tokens=1)
        await stage.prefilled("first")
        for request_id in IDS:
            await make_suspect(stage.redis, request_id)
            await stage.add(request_id)
        await eventually(lambda: _are_queued(stage))
        yield


async def make_suspect(redis: RedisClient, request_id: str) -> None:
    """Makes the request a suspect: one worker has died with it, and a second one has when it is claimed."""
    died = {"status": "running", "instance": "gone", "epoch": 1, "crashes": 1, "strikes": 1}
    await redis.hset(keys.state("q", request_id), mapping=died)  # type: ignore[arg-type]


async def _are_queued(stage: Stage) -> bool:
    return all(
        [
            await stage.redis.hget(keys.state("q", each), "status") == "queued" or await stage.has_ended(each)
            for each in IDS
        ]
    )


@scene(State.GIVEN_BACK)
async def given_back(stage: Stage) -> AsyncIterator[None]:
    engine = Engine(max_num_seqs=2)
    engine.hold()
    async with stage.full_worker():
        async with running_worker(stage.url, engine, drain_timeout_s=0.01) as draining:
            await stage.add_both()
            await eventually(lambda: len(engine.prefilled) == 2)
            await draining.drain()
        yield


@scene(State.READ)
async def read(stage: Stage) -> AsyncIterator[None]:
    """The claims wait for Redis, or for whatever comes before them."""
    may_claim, reached = asyncio.Event(), set[str]()
    claim = Claimer.claim

    async def held(claimer: Claimer, entry: QueueEntry, **options: Any) -> Any:
        if entry.fields.get(b"id", b"").decode() in IDS:
            reached.add(entry.id)
            await may_claim.wait()
        return await claim(claimer, entry, **options)

    stage.monkeypatch.setattr(Claimer, "claim", held)
    stage.on_release(may_claim.set)
    stage.acts = may_claim.set
    async with stage.worker(4):
        await stage.add_both()
        await eventually(lambda: len(reached) == 2)
        yield


@scene(State.PREPARING)
async def preparing(stage: Stage) -> AsyncIterator[None]:
    blocked = Blocked()
    stage.on_release(blocked.may_go_on.set)
    async with stage.worker(4, text=SlowText(blocked)):
        stage.prompt = "user:x"
        await stage.add_both(messages=[{"role": "user", "content": "x"}])
        await eventually(lambda: blocked.num_begun == 2)
        yield


@scene(State.COMPILING)
async def compiling(stage: Stage) -> AsyncIterator[None]:
    blocked = Blocked()
    stage.on_release(blocked.may_go_on.set)
    async with stage.worker(4, grammars=SlowGrammars(blocked)):
        await stage.add_both(regex="a+")
        await eventually(lambda: blocked.num_begun == 2)
        yield


@scene(State.RUNNING)
async def running(stage: Stage) -> AsyncIterator[None]:
    async with stage.worker(2):
        await stage.add_both()
        await stage.prefilled(*IDS)
        yield


@scene(State.PREEMPTED)
async def preempted(stage: Stage) -> AsyncIterator[None]:
    async with stage.worker(2, is_held=False):
        stage.engines[0].preempted = frozenset(IDS)
        await stage.add_both()
        await stage.prefilled(*IDS)
        yield


@scene(State.IN_OUTBOX)
async def in_outbox(stage: Stage) -> AsyncIterator[None]:
    """The requests have tokens that Redis does not take, and would go on."""
    async with RedisProxy(stage.url) as proxy, stage.worker(2, url=proxy.url) as worker:
        await stage.add_both(max_tokens=40)
        await stage.prefilled(*IDS)
        for request_id in IDS:
            stage.engines[0].allow(1)
            await read_until(stage.redis, request_id, lambda entry: entry.type in ("chunk", "end"))
        await proxy.stop()
        stage.engines[0].allow(5)
        await eventually(lambda: not worker.service.readiness.is_ready)
        stage.acts = proxy.start
        yield

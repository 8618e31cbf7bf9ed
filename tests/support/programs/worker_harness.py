"""Runs workers with the fake engine in the test's own event loop, and follows replies with raw XREAD."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from penstock.engine.loading.identity import Identity
from penstock.engine.stats import EngineInfo
from penstock.protocol import keys, scripts
from penstock.protocol.redis.address import Address
from penstock.protocol.redis.connection import RedisClient, ensure_group
from penstock.protocol.redis.streams import stream_entries
from penstock.protocol.scripts import Claim
from penstock.protocol.wire import ChunkEntry, EndEntry, OwnEntry, ReplyEntry, decode_reply
from penstock.tools.chaos.fake_engine import FakeEngine, fake_model
from penstock.tools.chaos.fake_words import word
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.preparation import Grammars, TextEncoder
from penstock.worker.service import WorkerService
from tests.support.patience import WAIT_S, eventually
from tests.support.redis_servers.streams import add_entry
from tests.support.watched import ended, watched

if TYPE_CHECKING:
    from penstock.protocol.telemetry.sdk import Telemetry

QUICK: dict[str, Any] = {
    "queue": "q",
    "heartbeat_ttl_s": 1.0,
    "reclaim_interval_s": 0.1,
    "block_ms": 100,
    "cancel_poll_ms": 20,
    "flush_interval_ms": 5,
    "drain_timeout_s": 5.0,
    "health_port": None,
}
_names = itertools.count()


@dataclass
class Running:
    service: WorkerService
    engine: FakeEngine
    _task: asyncio.Task[None]
    is_looked_at: bool = False  # the test sees for itself how it ends

    @property
    def task(self) -> asyncio.Task[None]:
        self.is_looked_at = True
        return self._task

    async def drain(self) -> None:
        self.service.request_drain()
        await self.task


@dataclass
class Reply:
    """A whole reply stream, as a reader without the client library sees it."""

    ids: list[str]
    entries: list[ReplyEntry]

    @property
    def end(self) -> EndEntry:
        ends = [entry for entry in self.entries if isinstance(entry, EndEntry)]
        assert len(ends) == 1
        assert self.entries[-1] is ends[0]
        return ends[0]

    @property
    def chunks(self) -> list[ChunkEntry]:
        return [entry for entry in self.entries if isinstance(entry, ChunkEntry) and entry.prefill_done is None]

    @property
    def prefills(self) -> list[tuple[int, int]]:
        """How far the prompt was, each time that it was told."""
        entries = [entry for entry in self.entries if isinstance(entry, ChunkEntry) and entry.prefill_done is not None]
        assert all((entry.index, entry.text, entry.tokens) == (0, "", ()) for entry in entries)
        return [(entry.prefill_done or 0, entry.prefill_total or 0) for entry in entries]

    @property
    def owners(self) -> list[str]:
        return [entry.worker for entry in self.entries if isinstance(entry, OwnEntry)]

    def text(self, index: int = 0) -> str:
        return "".join(chunk.text for chunk in self.chunks if chunk.index == index)

    def choices(self, n: int) -> list[tuple[str, list[int]]]:
        """Returns text and tokens of each choice."""
        return [(self.text(index), self.tokens(index)) for index in range(n)]

    def tokens(self, index: int = 0) -> list[int]:
        """Returns the tokens, each once: fails where the offsets have a gap or an overlap."""
        tokens: list[int] = []
        for chunk in self.chunks:
            if chunk.index == index:
                assert chunk.offset == len(tokens)
                tokens += chunk.tokens
        return tokens


@asynccontextmanager
async def serving(service: WorkerService) -> AsyncIterator[None]:
    """Runs a worker in this process, which drains at the block's end."""
    running = asyncio.create_task(service.run(), name="worker")
    try:
        async with watched(running):
            yield
    finally:
        service.request_drain()
        await ended(running)
    await running


@asynccontextmanager
async def running_worker(
    url: str,
    engine: FakeEngine | None = None,
    text: TextEncoder | None = None,
    identity: Identity | None = None,
    info: EngineInfo | None = None,
    model_name: str = "",
    telemetry: Telemetry | None = None,
    at: Address | None = None,
    grammars: Grammars | None = None,
    **options: Any,
) -> AsyncIterator[Running]:
    """Runs a worker that has joined its queue; it is drained or aborted at the end, whatever happened to it.

    An error that ends it ends the block too, unless the test has its `task`.
    """
    engine = engine or FakeEngine()
    model = replace(fake_model(engine), identity=identity, info=info, name=model_name, grammars=grammars)
    model = model if text is None else replace(model, text=text)
    config = WorkerConfig(**{**QUICK, "name": f"w{next(_names)}", **options})
    service = WorkerService(config, at or url, lambda _: model, telemetry)
    task = asyncio.create_task(service.run(), name=f"worker {config.name}")
    running = Running(service, engine, task)
    try:
        await eventually(lambda: service.readiness.is_ready or task.done())
        async with watched(task, lambda: not running.is_looked_at):
            yield running
    finally:
        engine.allow()
        for _ in range(2):
            service.request_drain()
        await ended(task)
        if not task.cancelled():
            task.exception()  # the test looks at it where it matters


async def send(redis: RedisClient, **fields: Any) -> str:
    """Sends XADD with flat fields, as redis-cli would; returns the id of the entry."""
    return await add_entry(redis, keys.requests("q"), {name: str(value) for name, value in fields.items()})


async def read_reply(redis: RedisClient, request_id: str, *, queue: str = "q") -> Reply:
    """Follows a reply to its end."""
    return await read_until(redis, request_id, lambda entry: isinstance(entry, EndEntry), queue=queue)


async def read_until(
    redis: RedisClient, request_id: str, is_last: Callable[[ReplyEntry], bool], *, queue: str = "q"
) -> Reply:
    reply = Reply([], [])
    give_up_s = time.monotonic() + WAIT_S
    while time.monotonic() < give_up_s:
        after = reply.ids[-1] if reply.ids else "0"
        answer = await redis.xread({keys.reply(queue, request_id): after}, block=1000)
        for _, entries in stream_entries(answer):
            for entry_id, fields in entries:
                reply.ids.append(str(entry_id))
                reply.entries.append(decode_reply(fields))  # type: ignore[arg-type]
                if is_last(reply.entries[-1]):
                    return reply
    raise AssertionError(f"no end of {request_id} within {WAIT_S:g} s, only {reply.entries[-3:]}")


async def is_queue_empty(redis: RedisClient) -> bool:
    """Checks that nothing waits, nothing is pending and nothing was left undeleted."""
    if await redis.xlen(keys.requests("q")):
        return False
    return int((await redis.xpending(keys.requests("q"), keys.GROUP))["pending"]) == 0


async def take_and_claim(
    redis: RedisClient, worker: str, request_id: str, *, digest: str = "", arithmetic: str = ""
) -> Claim:
    """Reads the next entry and claims it, as a worker that then dies."""
    await ensure_group(redis, "q")
    answer = await redis.xreadgroup(keys.GROUP, worker, {keys.requests("q"): ">"}, count=1)
    [(_, [(entry_id, _)])] = stream_entries(answer)
    command = scripts.claim(
        "q",
        request_id,
        entry_id=str(entry_id),
        worker=worker,
        instance="i",
        ttl_ms=10**6,
        digest=digest,
        arithmetic=arithmetic,
    )
    _, epoch, *_ = await redis.execute_command(*command)
    return Claim(int(epoch), "i", False, False, 0, 0, 1, 0, 0, 0)


async def add_chunk(
    redis: RedisClient, request_id: str, number: int, offset: int, tokens: list[int], **more: str | int
) -> None:
    """Writes a chunk as the owner of a request would."""
    fields = {
        "type": "chunk",
        "index": 0,
        "offset": offset,
        "text": "".join(map(word, tokens)),
        "tokens": ",".join(map(str, tokens)),
        **more,
    }
    epoch = str(await redis.hget(keys.state("q", request_id), "epoch"))
    await add_entry(redis, keys.reply("q", request_id), fields, entry_id=f"{epoch}-{number}")


async def end_as(
    redis: RedisClient, request_id: str, claim: Claim, status: Literal["done", "dead"], **end: str
) -> None:
    fields = ["type", "end", *(part for item in end.items() for part in item)]
    command = scripts.finish(
        "q", request_id, claim=claim, last_number=0, status=status, ttl_ms=10**6, entries=[(1, fields)]
    )
    assert await redis.execute_command(*command) == "ok"

"""The publisher by itself, for each answer that a chunk can get."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import structlog
from redis.asyncio import Redis

from penstock.engine.request import Output
from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.protocol.redis.pipeline import execute
from penstock.protocol.scripts import Claim
from penstock.protocol.tasks import end_tasks
from penstock.protocol.wire import GenerateRequest
from penstock.serving.readiness import Readiness
from penstock.worker.config import WorkerConfig
from penstock.worker.metrics import WorkerMetrics
from penstock.worker.publish.coalescing import Coalescing
from penstock.worker.publish.outbox import Outbox
from penstock.worker.publish.publisher import Publisher
from penstock.worker.publish.writes import MAX_SILENT_TOKENS
from penstock.worker.run.choices import ChoiceBuffer
from penstock.worker.run.entries import QueueEntry
from penstock.worker.run.requests import LiveRequest, RequestTable
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import ranked
from tests.support.redis_servers.streams import add_entry, read_raw_stream
from tests.support.watched import watched


@dataclass
class Desk:
    publisher: Publisher
    outbox: Outbox
    redis: RedisClient
    metrics: WorkerMetrics
    aborted: list[str]
    requests: RequestTable
    coalescing: Coalescing

    async def claim(self, request_id: str, n: int = 1) -> LiveRequest:
        command = scripts.claim("q", request_id, entry_id="1-1", worker="w", instance="i", ttl_ms=10**6)
        claim = scripts.parse_claim(await self.redis.execute_command(*command), "i")
        assert isinstance(claim, Claim)
        asked = GenerateRequest(prompt="x", n=n)
        entry = QueueEntry("1-1", {}, 0)
        live = LiveRequest("q", request_id, entry, claim, time.monotonic(), asked, structlog.get_logger())
        live.resume([ChoiceBuffer(index) for index in range(n)])
        self.requests.add(live)
        return live

    async def gone(self, live: LiveRequest) -> None:
        """Waits until its end is written; its entry leaves the queue with the next flush, which may be long after."""
        async with asyncio.timeout(WAIT_S):
            while not live.is_gone:
                await self.requests.changed.wait()

    async def written(self, request_id: str) -> list[tuple[str, str]]:
        """Returns (entry id, tokens) of the chunks."""
        entries = await read_raw_stream(self.redis, keys.reply("q", request_id))
        ids = ranked(id_ for id_, _ in entries)
        return [
            (id_, fields[b"tokens"].decode())
            for id_, (_, fields) in zip(ids, entries, strict=True)
            if b"tokens" in fields
        ]


@asynccontextmanager
async def publishing(redis_url: str, flush_interval_s: float = 0) -> AsyncIterator[Desk]:
    redis = connect(redis_url, decode=False, retries=0)
    metrics, aborted = WorkerMetrics(), list[str]()
    requests = RequestTable(aborted.append)
    config = WorkerConfig(queue="q", name="w")
    coalescing = Coalescing(flush_interval_s, flush_interval_s, lambda _: None)
    outbox = Outbox(config, requests, coalescing, has_nodes=False)
    publisher = Publisher(redis, outbox, coalescing, metrics, Readiness())
    task = asyncio.create_task(publisher.run(), name="publisher")
    async with watched(task), asyncio.timeout(WAIT_S):
        yield Desk(publisher, outbox, redis, metrics, aborted, requests, coalescing)
    await end_tasks([task])
    await redis.aclose()


def outputs(request_id: str, index: int = 0) -> Iterator[Output]:
    for offset in range(10**6):
        yield Output(request_id, index, offset, (100 * index + offset,), " a")


async def test_outputs_that_come_during_a_flush_go_with_the_next(redis_url: str) -> None:
    async with publishing(redis_url) as desk:
        live = await desk.claim("r")
        for _, output in zip(range(50), outputs("r"), strict=False):
            desk.outbox.push(live, output)
            await asyncio.sleep(0)
        await desk.publisher.wait_idle()
        written = await desk.written("r")
    assert [token for _, tokens in written for token in tokens.split(",")] == [str(i) for i in range(50)]
    assert len(written) < 50


async def test_one_s_own_chunk_sent_again_is_absorbed_and_one_that_was_overtaken_is_renumbered(redis_url: str) -> None:
    """Both chunks of a flush were sent, only the second was executed, and no answer came back."""
    async with publishing(redis_url) as desk:
        live = await desk.claim("r", n=2)
        arrived: dict[str, Any] = {"type": "chunk", "index": 1, "offset": 0, "text": " a", "tokens": "100"}
        await add_entry(desk.redis, keys.reply("q", "r"), arrived, entry_id=f"{live.claim.epoch}-2")
        for index in (0, 1):
            desk.outbox.push(live, next(outputs("r", index)))
        await desk.publisher.wait_idle()
        assert await desk.written("r") == [("1-2", "100"), ("1-3", "0")]
        assert desk.metrics.absorbed_retries._value.get() == 1
    assert desk.aborted == []


async def test_a_waiting_chunk_goes_with_the_end_and_the_end_is_written_once(redis_url: str) -> None:
    async with publishing(redis_url, flush_interval_s=60) as desk:
        live = await desk.claim("r")
        desk.outbox.push(live, Output("r", 0, 0, (1,), " a"))
        await desk.publisher.wait_idle()
        desk.outbox.push(live, Output("r", 0, 1, (2,), " b"))
        await asyncio.sleep(0.03)
        desk.outbox.push(live, Output("r", 0, 2, (3,), " c", finish_reason="stop"))
        await desk.gone(live)
        assert [tokens for _, tokens in await desk.written("r")] == ["1", "2,3"]
        assert desk.metrics.requests.labels(finish_reason="stop")._value.get() == 1


async def test_a_first_token_without_text_goes_with_the_first_that_has_some(redis_url: str) -> None:
    async with publishing(redis_url, flush_interval_s=60) as desk:
        live = await desk.claim("r")
        for token_id, text in enumerate(["", "", "a", "b"]):
            desk.outbox.push(live, Output("r", 0, token_id, (token_id,), text))
            await desk.publisher.wait_idle() if text != "b" else None
        assert await desk.written("r") == [("1-1", "0,1,2")]  # the one that follows is held back as ever
        desk.outbox.end(live, "cancelled")
        await desk.gone(live)
        assert [tokens for _, tokens in await desk.written("r")] == ["0,1,2", "3"]


async def test_tokens_without_text_are_not_held_back_for_ever(redis_url: str) -> None:
    async with publishing(redis_url, flush_interval_s=60) as desk:
        many, ended, handed_back = [await desk.claim(name) for name in ("many", "ended", "handed back")]
        for place in range(MAX_SILENT_TOKENS):
            desk.outbox.push(many, Output("many", 0, place, (place,), ""))
        desk.outbox.push(handed_back, Output("handed back", 0, 0, (7,), ""))
        desk.outbox.push(ended, Output("ended", 0, 0, (7,), "", finish_reason="stop"))
        await desk.gone(ended)
        assert await desk.written("many") == [("1-1", ",".join(map(str, range(MAX_SILENT_TOKENS))))]
        assert [tokens for _, tokens in await desk.written("ended")] == ["7"]
        assert await desk.written("handed back") == []
        desk.outbox.flush_soon(handed_back)
        await eventually(lambda: desk.written("handed back"))
        assert [tokens for _, tokens in await desk.written("handed back")] == ["7"]


async def test_of_several_choices_the_first_text_is_not_held_back(redis_url: str) -> None:
    async with publishing(redis_url, flush_interval_s=60) as desk:
        live = await desk.claim("r", n=2)
        desk.outbox.push(live, Output("r", 0, 0, (1,), ""))
        desk.outbox.push(live, Output("r", 1, 0, (2,), "", finish_reason="stop"))
        await desk.publisher.wait_idle()
        assert sorted(tokens for _, tokens in await desk.written("r")) == ["1", "2"]  # the end of a choice is told
        desk.outbox.push(live, Output("r", 0, 1, (3,), "a"))
        await desk.publisher.wait_idle()
        assert sorted(tokens for _, tokens in await desk.written("r")) == ["1", "2", "3"]


async def test_an_end_does_not_wait_for_the_interval(redis_url: str) -> None:
    async with publishing(redis_url, flush_interval_s=60) as desk:
        live, _ = await desk.claim("r"), await desk.claim("still running")
        desk.outbox.push(live, Output("r", 0, 0, (1,), " a"))
        await desk.publisher.wait_idle()
        desk.outbox.push(live, Output("r", 0, 1, (2,), " b", finish_reason="stop"))
        await desk.gone(live)
        assert [tokens for _, tokens in await desk.written("r")] == ["1", "2"]


async def test_while_processors_are_short_an_end_waits_with_the_chunks_of_what_still_runs(redis_url: str) -> None:
    async with publishing(redis_url) as desk:
        desk.coalescing.interval_s = 60
        lives = [await desk.claim(f"r{i}") for i in range(3)]
        for live in lives:
            desk.outbox.push(live, Output(live.id, 0, 0, (1,), " a"))
        await desk.publisher.wait_idle()
        for live in lives[:2]:
            desk.outbox.push(live, Output(live.id, 0, 1, (2,), " b", finish_reason="length"))
        await asyncio.sleep(0.1)
        assert [len(await desk.written(live.id)) for live in lives] == [1, 1, 1]
        assert not desk.outbox.is_empty
        desk.outbox.push(lives[2], Output("r2", 0, 1, (2,), " b", finish_reason="stop"))  # nothing runs any more
        async with asyncio.timeout(WAIT_S):
            while len(desk.requests):
                await desk.requests.changed.wait()
        for live in lives:
            assert [tokens for _, tokens in await desk.written(live.id)] == ["1", "2"]


async def test_an_entry_stays_until_the_server_has_confirmed_its_end(redis_url: str) -> None:
    """A full server refuses the end, but would take the acknowledgement."""
    stream, entry = keys.requests("q"), (b"1-1", {b"prompt": b"x"})
    async with publishing(redis_url) as desk:
        await desk.redis.xgroup_create(stream, keys.GROUP, id="0", mkstream=True)
        await desk.redis.xadd(stream, {"prompt": "x"}, id="1-1")
        await desk.redis.xreadgroup(keys.GROUP, "w", {stream: ">"})
        live = await desk.claim("r")
        desk.outbox.push(live, next(outputs("r")))
        await desk.publisher.wait_idle()  # by now the server is known: on a new one no entry leaves before a look
        await desk.redis.config_set("maxmemory", 1)
        try:
            desk.outbox.end(live, "cancelled")
            await eventually(lambda: desk.metrics.publish_failures._value.get() >= 3)
            assert await read_raw_stream(desk.redis, stream) == [entry]
            assert (await desk.redis.xpending(stream, keys.GROUP))["pending"] == 1
            assert desk.outbox.leaving == set()
        finally:
            await desk.redis.config_set("maxmemory", 0)
        await asyncio.wait_for(desk.publisher.wait_idle(), WAIT_S)
        _, end = (await read_raw_stream(desk.redis, keys.reply("q", "r")))[-1]
        assert end[b"finish_reason"] == b"cancelled"
        assert await read_raw_stream(desk.redis, stream) == []
        assert (await desk.redis.xpending(stream, keys.GROUP))["pending"] == 0


async def fence(desk: Desk) -> None:
    await desk.claim("r")


async def vanish(desk: Desk) -> None:
    await desk.redis.delete(keys.reply("q", "r"))


async def lose(desk: Desk, happening: Callable[[Desk], Awaitable[None]], reason: str) -> None:
    live = await desk.claim("r")
    source = outputs("r")
    desk.outbox.push(live, next(source))
    await desk.publisher.wait_idle()
    await happening(desk)
    before = await desk.written("r")
    for _ in range(3):
        desk.outbox.push(live, next(source))
        await desk.publisher.wait_idle()
    assert await desk.written("r") == before
    assert desk.aborted == ["r"]
    assert desk.metrics.dropped.labels(reason=reason)._value.get() == 1


async def test_a_fenced_request_is_dropped_with_its_first_refused_chunk(redis_url: str) -> None:
    async with publishing(redis_url) as desk:
        await lose(desk, fence, "fenced")


@pytest.mark.parametrize("finds_out", ["by a refused chunk", "by a refused end", "by a look at a new connection"])
async def test_who_finds_an_heir_takes_its_own_crash_back(redis_url: str, finds_out: str) -> None:
    async with publishing(redis_url) as desk:
        live = await desk.claim("r")
        heir = scripts.claim("q", "r", entry_id="1-1", worker="heir", instance="j", ttl_ms=10**6)
        await desk.redis.execute_command(*heir)
        state = keys.state("q", "r")
        assert await desk.redis.hmget(state, "crashes", "strikes") == [b"1", b"1"]
        if finds_out == "by a look at a new connection":
            assert isinstance(desk.redis, Redis)
            await desk.redis.connection_pool.disconnect()
        reason: Any = "stop" if finds_out == "by a refused end" else None
        desk.outbox.push(live, Output("r", 0, 0, (1,), " a", finish_reason=reason))
        await desk.gone(live)
        await desk.publisher.wait_idle()
        assert await desk.redis.hmget(state, "crashes", "strikes", "instance") == [b"0", b"0", b"j"]


async def test_a_request_whose_reply_is_gone_is_dropped_and_no_new_reply_made(redis_url: str) -> None:
    async with publishing(redis_url) as desk:
        await lose(desk, vanish, "gone")
        assert not await desk.redis.exists(keys.reply("q", "r"))


async def test_a_fenced_end_is_not_written(redis_url: str) -> None:
    async with publishing(redis_url) as desk:
        live = await desk.claim("r")
        await desk.claim("r")
        desk.outbox.push(live, Output("r", 0, 0, (1,), " a", finish_reason="stop"))
        await desk.publisher.wait_idle()
        entries = await read_raw_stream(desk.redis, keys.reply("q", "r"))
    assert [fields[b"type"] for _, fields in entries] == [b"own", b"own"]
    assert desk.aborted == ["r"]


async def test_pipeline_keeps_answers_and_errors_apart_and_in_order(redis_url: str) -> None:
    redis = connect(redis_url, decode=False, retries=0)
    answers = await execute(redis, [("SET", "a", "ä"), ("LPUSH", "a", 1), ("GET", "a"), ("XRANGE", "s", "-", "+")])
    await redis.aclose()
    assert answers[0] in (True, b"OK", "OK")
    assert "WRONGTYPE" in str(answers[1])
    assert answers[2:] == ["ä".encode(), []]

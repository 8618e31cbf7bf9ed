"""Junk in a key of a queue or request ends that request at most; other requests and workers do not notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.producer import AsyncClient
from penstock.protocol import keys
from penstock.protocol.key_kinds import KeyKind
from penstock.protocol.operations import dead_letters, requests, tenants, waiting
from penstock.protocol.operations.collector import look
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.faults import is_junk
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text
from tests.support.patience import eventually, mostly_slow
from tests.support.programs.worker_harness import Running, is_queue_empty, read_reply, running_worker
from tests.support.redis_servers.junk import QUEUE_KINDS, WRONG_TYPES, WRONG_VALUES, Type, Write, harm, is_kept
from tests.support.redis_servers.streams import add_entry

OF_REQUESTS = ("reply", "state", "cancel")
NOT_THE_WORKERS = ("requests", "wake", *OF_REQUESTS)
"""Keys not tested here: the stream of requests stays as it is, a client's own stream is nobody else's, and a request's
keys have a test of their own.
"""

JUNK: dict[str, dict[str, Any]] = {
    **{
        f"a {type_}": {kind.name: write for kind in QUEUE_KINDS if kind.type != type_}
        for type_, write in WRONG_TYPES.items()
    },
    **{
        value: {kind.name: WRONG_VALUES[kind.type][value] for kind in QUEUE_KINDS if value in WRONG_VALUES[kind.type]}
        for values in WRONG_VALUES.values()
        for value in values
    },
}
QUICK = ("a string", "a list", "a hash", "a set", "a zset", "a stream", "words", "no text", "inf", "the last id")


class Line:
    """A client that has the worker do one of each thing that a queue's keys are for."""

    def __init__(self, worker: Running, client: AsyncClient, redis: RedisClient) -> None:
        self.worker = worker
        self._client = client
        self._redis = redis
        self._number = 0

    async def pass_through(self) -> None:
        """Sends a request of a tenant with deadline and home, a malformed entry and a call; all end as they should."""
        self._number += 1
        good, bad = f"r{self._number}", f"m{self._number}"
        stream = keys.requests("q")
        fields = {"prompt": "beside", "max_tokens": "3", "tenant": "t", "timeout_s": "600", "affinity": "a"}
        await add_entry(self._redis, stream, {**fields, "id": good})
        await self._redis.xadd(stream, {"nonsense": "x", "id": bad})
        reply = await read_reply(self._redis, good)
        assert reply.text() == expected_text("beside", good, 3)
        assert (await read_reply(self._redis, bad)).end.code == "invalid_request"
        assert await self._client.count_tokens("a b c")
        await eventually(lambda: is_queue_empty(self._redis))
        assert not self.worker.task.done(), self.worker.task


@asynccontextmanager
async def standing_in_line(redis_url: str, redis: RedisClient, **more: Any) -> AsyncIterator[Line]:
    async with running_worker(redis_url, name="w", **more) as worker, AsyncClient(redis_url, queue="q") as client:
        line = Line(worker, client, redis)
        await line.pass_through()
        yield line


def key_of(kind: KeyKind) -> str:
    return kind.key(
        queue="q",
        tenant="t",
        priority=0,
        worker="w",
        request_id="x",
        mailbox="m",
        client_id="c",
        kind="/",  # that of this worker
        letters=keys.malformed("q"),
    )


@pytest.mark.parametrize("writes", mostly_slow(JUNK, *QUICK))
async def test_junk_in_a_queue_s_key_harms_nobody(
    redis_url: str, redis: RedisClient, raw: RedisClient, writes: dict[str, Any]
) -> None:
    async with standing_in_line(redis_url, redis) as line:
        for kind in QUEUE_KINDS:
            if kind.name not in writes or kind.name in NOT_THE_WORKERS:
                continue
            key = key_of(kind)
            with capture_logs() as logs:
                junk = await harm(raw, key, writes[kind.name])
                await line.pass_through()
            named = [log["key"] for log in logs if log["event"] == "junk_set_aside"]
            assert named.count(key) <= 1, logs
            assert not [log for log in logs if log["log_level"] == "critical"]
            if writes[kind.name] in WRONG_TYPES.values() and kind.name != "report":  # it is overwritten
                assert await is_kept(raw, key, junk), key
        await eventually(lambda: line.worker.service.readiness.is_ready)
        await is_calm(raw)


STANDING = {
    "requests", "seen", "lane", "band", "bands", "due", "named", "charged", "load", "workers", "room", "malformed",
    "letter_sizes", "letter_bytes", "heartbeat", "serving", "queues", "card", "reports", "state", "reply",
}  # fmt: skip


async def test_keys_are_of_their_kinds(redis_url: str, redis: RedisClient) -> None:
    """The table says what Redis stores in each, and which of them expire."""
    engine = FakeEngine(max_num_seqs=1)
    async with standing_in_line(redis_url, redis, engine=engine), AsyncClient(redis_url, queue="q") as client:
        engine.hold()
        handles = [await client.submit("x", max_tokens=3, tenant="t", timeout_s=600, id=f"waits{i}") for i in range(3)]
        await eventually(lambda: are_as_declared(redis, STANDING))
        engine.allow()
        await asyncio.gather(*(handle.result() for handle in handles))
    await eventually(lambda: are_as_declared(redis, {"requests", "seen", "state", "reply", "malformed"}))


async def are_as_declared(redis: RedisClient, at_least: set[str]) -> bool:
    found = {kind_of(key): key for key in map(str, await redis.keys("*"))}
    kinds = {kind: (await redis.type(key), await redis.pttl(key) != -1) for kind, key in found.items()}
    return at_least <= {kind.name for kind in kinds} and all(
        is_so == (kind.type, kind.expiry != "") for kind, is_so in kinds.items()
    )


def kind_of(key: str) -> KeyKind:
    """Returns the kind whose pattern says most about a key."""
    patterns = [(len(pattern), kind) for kind in QUEUE_KINDS for pattern in kind.patterns if fnmatchcase(key, pattern)]
    return max(patterns, key=itemgetter(0))[1]


async def is_calm(raw: RedisClient) -> None:
    """Checks that nobody asks the server the same again and again."""
    before = (await raw.info("stats"))["total_commands_processed"]
    await asyncio.sleep(0.3)
    assert (await raw.info("stats"))["total_commands_processed"] - before < 1000


REQUEST_TYPES: dict[str, Type] = {"reply": "stream", "state": "hash", "cancel": "string"}
REQUEST_JUNK: dict[str, tuple[str, Write]] = {
    f"{name}: {what}": (name, write)
    for name, values in REQUEST_TYPES.items()
    for what, write in (
        *((type_, write) for type_, write in WRONG_TYPES.items() if type_ != values),
        *(WRONG_VALUES[values].items() if name != "reply" else ()),
    )
}
COUNTS = ("claimed_ms", "attempts", "crashes", "strikes", "handbacks")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_junk_in_a_request_s_key_ends_that_request(
    redis_url: str, redis: RedisClient, raw: RedisClient, when: str
) -> None:
    engine = FakeEngine()
    async with standing_in_line(redis_url, redis, engine=engine) as line:
        for number, (case, (name, write)) in enumerate(REQUEST_JUNK.items()):
            request_id = f"x{number}"
            key = getattr(keys, name)("q", request_id)
            if when == "meanwhile":
                engine.hold()
            else:
                await write(raw, key)
            await redis.xadd(keys.requests("q"), {"prompt": "x", "id": request_id, "max_tokens": "3"})
            if when == "meanwhile":
                await eventually(lambda request_id=request_id: request_id in engine.prefilled)
                await harm(raw, key, write)
                engine.allow()
            await eventually(lambda: is_queue_empty(redis))
            if name != "reply":
                end = (await read_reply(redis, request_id)).end
                assert end.finish_reason in ("error", "length", "stop", "cancelled"), (case, end)
                assert "WRONGTYPE" not in (end.message or "")
            assert not line.worker.task.done(), case
        await line.pass_through()


@pytest.mark.parametrize("field", COUNTS)
async def test_a_count_that_is_none_ends_its_request_with_an_error(
    redis_url: str, redis: RedisClient, field: str
) -> None:
    async with standing_in_line(redis_url, redis) as line:
        await redis.hset(keys.state("q", "x"), field, "junk")
        await redis.xadd(keys.requests("q"), {"prompt": "x", "id": "x", "max_tokens": "3"})
        end = (await read_reply(redis, "x")).end
        assert (end.finish_reason, end.code) == ("error", "reply_unwritable")
        await line.pass_through()


async def test_a_drained_worker_gives_back_what_cannot_be_counted(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine()
    engine.hold()
    async with running_worker(redis_url, engine, drain_timeout_s=0.05) as worker:
        for request_id in ("x", "beside"):
            await redis.xadd(keys.requests("q"), {"prompt": "x", "id": request_id, "max_tokens": "3"})
        await eventually(lambda: len(engine.prefilled) == 2)
        await redis.hset(keys.state("q", "x"), "handbacks", "junk")
        await worker.drain()
    async with running_worker(redis_url):
        assert (await read_reply(redis, "x")).end.code == "reply_unwritable"
        assert (await read_reply(redis, "beside")).text() == expected_text("x", "beside", 3)


async def test_while_the_requests_are_no_stream_a_worker_says_so_and_waits(
    redis_url: str, redis: RedisClient, raw: RedisClient
) -> None:
    stream = keys.requests("q")
    async with standing_in_line(redis_url, redis) as line:
        readiness = line.worker.service.readiness
        with capture_logs() as logs:
            junk = await harm(raw, stream, WRONG_TYPES["string"])
            await eventually(lambda: any(stream in reason for reason in readiness.reasons.values()))
            await is_calm(raw)
        assert await is_kept(raw, stream, junk)
        assert not line.worker.task.done()
        assert len([log for log in logs if log["log_level"] in ("warning", "error")]) <= 3, logs
        await redis.delete(stream)
        await line.pass_through()
        await eventually(lambda: readiness.is_ready)


async def letters(redis: RedisClient) -> list[Any]:
    return [letter for kind in dead_letters.KINDS async for letter in dead_letters.read_letters(redis, "q", kind)]


@pytest.mark.parametrize("writes", mostly_slow(JUNK, *QUICK))
async def test_operators_look_at_a_queue_whatever_its_keys_hold(
    redis_url: str, redis: RedisClient, raw: RedisClient, writes: dict[str, Any]
) -> None:
    async with standing_in_line(redis_url, redis):
        pass
    for kind in QUEUE_KINDS:
        if kind.name not in writes or kind.name == "wake":
            continue
        key = key_of(kind)
        junk = await harm(raw, key, writes[kind.name])
        found = await asyncio.gather(
            look(raw, "q"),
            requests.look_up(raw, "q", "x"),
            waiting.next_to_run(raw, "q", limit=10),
            tenants.tenants(raw, "q"),
            letters(raw),
            return_exceptions=True,
        )
        unexpected = [each for each in found if isinstance(each, BaseException) and not is_junk(each)]
        assert not unexpected, (kind.name, unexpected)
        assert await raw.dump(key) == junk, "a look changes nothing"
        await raw.delete(key)

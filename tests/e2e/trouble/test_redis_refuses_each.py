"""Each command of a worker meets each refusal and is sent again until it passes: nothing is lost, no worker ends."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest
from redis.exceptions import ResponseError

from penstock.engine.loading.identity import Identity
from penstock.producer import AsyncClient
from penstock.protocol import keys, scripts
from penstock.protocol.consumers import set_aside_for
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.faults import may_be_elsewhere
from penstock.protocol.scripts import calls, claims, entries, lanes, presence
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text, expected_tokens
from penstock.worker.errors import RedisRefused
from penstock.worker.redis import retries
from tests.support.patience import eventually
from tests.support.programs.worker_harness import (
    Running,
    add_chunk,
    is_queue_empty,
    read_reply,
    read_until,
    running_worker,
    send,
    take_and_claim,
)
from tests.support.redis_servers.refusing_proxy import PASSING, REFUSED, RefusingProxy

OLD, NEW = (Identity(revision=None, weights=weights, tokenizer="t", template=None) for weights in ("old", "new"))
ASIDE = set_aside_for(OLD.digest(None))
ANSWERS = (*PASSING.values(), *REFUSED.values())

TO_CONNECT = {"AUTH", "CLIENT SETNAME", "SELECT"}
AT_THE_START = {"permissions.DENIED", "presence.RESERVE", "presence.RELEASE"}
ONCE_AT_THE_END = {"presence.LEAVE", "presence.UNREPORT"}
FOR_METRICS = {"HGETALL", "XLEN"}  # read for whoever scrapes, who keeps the last values
DONE_BY_EACH_BEAT_TOO = {"PEXPIRE"}


def all_scripts() -> set[str]:
    """Returns the protocol's scripts, by the names that the proxy has for them."""
    return {
        f"{module.__name__.rpartition('.')[2]}.{name.lstrip('_')}"
        for module in (calls, claims, entries, lanes, presence)
        for name, value in vars(module).items()
        if isinstance(value, str) and "redis." in value and not name.startswith("__")
    }


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets retries and periodic tasks follow each other at once."""
    monkeypatch.setattr(retries.Backoff, "next_s", lambda _: 0.005)
    for name in ("watch.sweeping.SWEEP", "watch.reporting.REPORT", "intake.measuring.MEASURE", "watch.charging.CHARGE"):
        monkeypatch.setattr(f"penstock.worker.{name}_INTERVAL_S", 0.02)


async def test_each_command_meets_each_refusal(redis_url: str, redis: RedisClient, quick: None) -> None:
    engine = FakeEngine(step_s=0.002, max_num_seqs=4)
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(RefusingProxy(redis_url))
        await die_later(redis)
        client = await stack.enter_async_context(AsyncClient(redis_url, queue="q"))
        options: dict[str, Any] = {"heartbeat_ttl_s": 0.6, "drain_timeout_s": 0.0, "reclaim_interval_s": 0.02}
        worker = await stack.enter_async_context(
            running_worker(proxy.url, engine, identity=NEW, name="w", suspect_wait_s=0.05, **options)
        )
        proxy.refuse_in_turn(ANSWERS)
        work = Work(redis, client, worker, proxy)
        for part in (work.simple, work.cancelled, work.gives_way, work.fenced, work.aside, work.dead, work.suspect,
                     work.junk, work.call, work.forgotten):  # fmt: skip
            await part()
            assert not worker.task.done(), (part.__name__, worker.task)
        await work.drain()
    missing = all_scripts() - set(proxy.seen)
    assert not missing, f"nothing in this test has a worker run {missing}"
    by_name = [name for name in proxy.seen if not name.startswith("script ")]  # others are these within the guard
    left = {name: proxy.refused[name] for name in by_name if proxy.refused[name] < len(ANSWERS)}
    assert left.keys() <= TO_CONNECT | AT_THE_START | ONCE_AT_THE_END | FOR_METRICS | DONE_BY_EACH_BEAT_TOO, left


async def die_later(redis: RedisClient) -> None:
    """Leaves entries of two workers that are dead once their heartbeats are taken away."""
    await send(redis, prompt="x", id="begun", max_tokens=12, seed=5)
    await take_and_claim(redis, "dead", "begun", digest=OLD.digest(None))
    await add_chunk(redis, "begun", 1, 0, expected_tokens(b"x", 5, 0, 3))
    await send(redis, prompt="x", id="orphan", max_tokens=12)
    await take_and_claim(redis, "ghost", "orphan")
    for name in ("dead", "ghost", ASIDE):
        await redis.set(keys.heartbeat("q", name), "i", px=10**6)


async def test_a_start_waits_for_what_passes_and_ends_at_what_does_not(redis_url: str, quick: None) -> None:
    for name in (*sorted(AT_THE_START - {"presence.RELEASE"}), "presence.BEAT"):
        async with RefusingProxy(redis_url) as proxy:
            proxy.refuse_in_turn(PASSING.values(), name)
            async with running_worker(proxy.url):
                assert proxy.refused[name] == len(PASSING)
            for answer in REFUSED.values():
                proxy.refuse(answer, name)
                async with running_worker(proxy.url) as worker:
                    with pytest.raises(RedisRefused):
                        await worker.task


async def test_who_leaves_is_not_held_up(redis_url: str, redis: RedisClient, quick: None) -> None:
    """If its last words are refused, other workers find out by themselves."""
    async with RefusingProxy(redis_url) as proxy:
        for answer in ANSWERS:
            proxy.refuse(answer, "presence.RELEASE")
            async with running_worker(proxy.url) as worker:
                proxy.refuse(answer, *ONCE_AT_THE_END)
                await worker.drain()
        assert proxy.refused.keys() == {"presence.RELEASE", *ONCE_AT_THE_END}
        once_more = {code for code, answer in PASSING.items() if may_be_elsewhere(ResponseError(answer))}
        assert all(len(ANSWERS) <= num <= len(ANSWERS) + len(once_more) for num in proxy.refused.values())


class Work:
    """Has a worker send everything that it can send."""

    def __init__(self, redis: RedisClient, client: AsyncClient, worker: Running, proxy: RefusingProxy) -> None:
        self._redis = redis
        self._client = client
        self._worker = worker
        self._proxy = proxy

    async def simple(self) -> None:
        for place in range(3 * len(ANSWERS)):  # more: where passing one on is refused, it is taken
            await send(self._redis, prompt="x", id=f"x{place}", max_tokens=30, affinity="somewhere")
            reply = await read_reply(self._redis, f"x{place}")
            assert reply.text() == expected_text("x", f"x{place}", 30)
            assert len(reply.tokens()) == 30

    async def cancelled(self) -> None:
        handle = await self._client.submit("x", max_tokens=10**6)
        await read_until(self._redis, handle.id, lambda entry: entry.type == "chunk")
        await handle.cancel()
        assert (await handle.result()).finish_reason == "cancelled"

    async def gives_way(self) -> None:
        """Has requests give way, once for each step and refusal: after a refused step, the request that gave way is
        claimed again.
        """
        low = [await self._begin_low(place) for place in range(4)]
        for place in range(4, 40):  # it reports that it is full, if it reported room before the last one came
            if self._proxy.refused["ZADD"] >= len(ANSWERS):
                break
            await self._client.handle(low.pop()).cancel()
            await eventually(lambda: len(self._worker.service._session.requests) == 3)  # type: ignore[union-attr]
            low.append(await self._begin_low(place))
        for place in range(2 * len(ANSWERS)):
            await send(self._redis, prompt="x", id=f"high{place}", max_tokens=3)
            assert (await read_reply(self._redis, f"high{place}")).text() == expected_text("x", f"high{place}", 3)
        for name in low:
            await self._client.handle(name).cancel()
        for name in low:
            assert (await read_reply(self._redis, name)).end.finish_reason == "cancelled"

    async def _begin_low(self, place: int) -> str:
        name = f"low{place}"
        await send(self._redis, prompt="x", id=name, max_tokens=10**6, priority=-5, tenant="t")
        await read_until(self._redis, name, lambda entry: entry.type == "chunk")
        return name

    async def fenced(self) -> None:
        """Takes requests away until a chunk was looked for in spite of each refusal. Over a new connection, the worker
        may find the claim before that.
        """
        for place in range(2 * len(ANSWERS)):
            name = f"z{place}"
            entry_id = await send(self._redis, prompt="x", id=name, max_tokens=600)
            await read_until(self._redis, name, lambda entry: entry.type == "chunk")
            thief = scripts.claim("q", name, entry_id=entry_id, worker="thief", instance="i", ttl_ms=10**6)
            await self._redis.execute_command(*thief)
            dropped = self._worker.service.metrics.dropped.labels(reason="fenced")._value
            await eventually(lambda: dropped.get() > place)  # noqa: B023
            self._worker.service._session.requests.recover()  # type: ignore[union-attr]
            assert (await read_reply(self._redis, name)).text() == expected_text("x", name, 600)
            if self._proxy.refused["claims.FIND"] >= len(ANSWERS):
                break

    async def aside(self) -> None:
        await self._redis.delete(keys.heartbeat("q", "dead"))
        await eventually(self._is_aside)
        await self._redis.delete(keys.heartbeat("q", ASIDE))
        assert (await read_reply(self._redis, "begun")).end.code == "model_gone"

    async def dead(self) -> None:
        await self._redis.delete(keys.heartbeat("q", "ghost"))
        assert (await read_reply(self._redis, "orphan")).text() == expected_text("x", "orphan", 12)
        await eventually(lambda: is_queue_empty(self._redis))

    async def suspect(self) -> None:
        died = {"status": "running", "instance": "gone", "epoch": 1, "crashes": 1, "strikes": 1}
        await self._redis.hset(keys.state("q", "suspect"), mapping=died)  # type: ignore[arg-type]
        await send(self._redis, id="suspect", prompt="x", max_tokens=3)
        assert (await read_reply(self._redis, "suspect")).text() == expected_text("x", "suspect", 3)

    async def junk(self) -> None:
        await self._redis.set(keys.state("q", "junk"), "junk")
        await send(self._redis, id="junk", prompt="x", max_tokens=3)
        assert (await read_reply(self._redis, "junk")).end.code == "reply_unwritable"
        await self._redis.delete(keys.bands("q"))
        await self._redis.set(keys.bands("q"), "junk")
        await send(self._redis, id="behind", prompt="x", max_tokens=3)
        assert (await read_reply(self._redis, "behind")).text() == expected_text("x", "behind", 3)
        await send(self._redis, id="malformed", max_tokens="many")
        assert (await read_reply(self._redis, "malformed")).end.finish_reason == "error"
        await eventually(lambda: is_queue_empty(self._redis))

    async def call(self) -> None:
        assert await self._client.count_tokens("x", timeout=60) == 1
        await self._redis.xgroup_createconsumer(keys.calls("q"), keys.GROUP, "died")
        await eventually(self._are_calls_taken_over)

    async def forgotten(self) -> None:
        """Has a new connection ask the server what it knows of running requests, and a deleted queue made anew."""
        await send(self._redis, prompt="x", id="n", max_tokens=400)
        await read_until(self._redis, "n", lambda entry: entry.type == "chunk")
        self._proxy.cut()
        assert (await read_reply(self._redis, "n")).text() == expected_text("x", "n", 400)
        await eventually(lambda: is_queue_empty(self._redis))
        await self._redis.xgroup_destroy(keys.requests("q"), keys.GROUP)
        await self.simple_again()

    async def simple_again(self) -> None:
        await send(self._redis, prompt="x", id="again", max_tokens=3)
        assert (await read_reply(self._redis, "again")).text() == expected_text("x", "again", 3)

    async def drain(self) -> None:
        await send(self._redis, prompt="x", id="handed", max_tokens=10**6)
        await read_until(self._redis, "handed", lambda entry: entry.type == "chunk")
        self._worker.service.request_drain()
        await self._worker.task
        assert await self._redis.hget(keys.state("q", "handed"), "handbacks") == "1"

    async def _are_calls_taken_over(self) -> bool:
        return {each["name"] for each in await self._redis.xinfo_consumers(keys.calls("q"), keys.GROUP)} == {"w"}

    async def _is_aside(self) -> bool:
        return bool(await self._redis.xpending_range(keys.requests("q"), keys.GROUP, "-", "+", 1, ASIDE))

"""Calls, from their stream to the answer: beside the engine's work, whoever dies, and never more than fits."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.engine.text.fewest_tokens import Check, let_pass
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.streams import stream_entries
from penstock.protocol.wire import MAX_TIMEOUT_MS
from penstock.tools.chaos.fake_engine import FakeEngine, FakeText
from penstock.worker.calls import server
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import running_worker, send
from tests.support.programs.worker_process import WorkerProcess
from tests.support.redis_servers.redis_proxy import RedisProxy
from tests.support.redis_servers.streams import add_entry

CALLS = keys.calls("q")


async def call(redis: RedisClient, name: str = "tokenize", **fields: str) -> str:
    """Sends XADD as redis-cli would; returns the id of the entry."""
    return await add_entry(redis, CALLS, {"call": name, "prompt": "abc", **fields})


async def answers(redis: RedisClient, mailbox: str, count: int = 1) -> list[dict[str, str]]:
    """Waits for `count` answers in a mailbox, and returns them."""
    found: list[dict[str, str]] = []
    cursor = "0"
    async with asyncio.timeout(WAIT_S):
        while len(found) < count:
            read = await redis.xread({keys.answers("q", mailbox): cursor}, block=500)
            for _, entries in stream_entries(read):
                cursor = entries[-1][0]  # type: ignore[assignment]
                found += [fields for _, fields in entries]  # type: ignore[misc]
    return found


async def is_idle(redis: RedisClient) -> bool:
    """Checks whether no call waits or is being answered."""
    return not await redis.xlen(CALLS) and not (await redis.xpending(CALLS, keys.GROUP))["pending"]


async def freeze_with_a_call(redis: RedisClient, worker: WorkerProcess) -> None:
    """Stops the worker in a blocked read, which the server then answers with a call."""
    async with asyncio.timeout(WAIT_S):
        while True:
            worker.send(signal.SIGSTOP)
            await call(redis, to="box", timeout_ms="60000")
            if (await redis.xpending(CALLS, keys.GROUP))["pending"]:
                return
            worker.send(signal.SIGCONT)  # it was between two reads
            await eventually(lambda: is_idle(redis))


class SlowText(FakeText):
    """Counts what it encodes, and encodes slowly."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.num_begun = 0

    def encode(self, text: str, check: Check = let_pass) -> Sequence[int]:
        if text.startswith("slow"):
            self.num_begun += 1
            assert self.go_on.wait(WAIT_S)
        return super().encode(text, check)


SLOW = "slow" + "x" * 5000  # too large to be done on the event loop


async def test_a_call_by_hand_is_answered_on_the_stream_that_it_names(redis_url: str, redis: RedisClient) -> None:
    async with running_worker(redis_url, name="w") as worker:
        entry_id = await call(redis)
        assert await answers(redis, entry_id) == [
            {"id": entry_id, "worker": "w", "prompt_tokens": "3", "tokens": "97,98,99"}
        ]
        await call(redis, id="mine")
        assert (await answers(redis, "mine"))[0]["id"] == "mine"
        await call(redis, "count_tokens", id="one", to="box")
        await call(redis, "nonsense", id="two", to="box")
        one, two = await answers(redis, "box", 2)
        assert one == {"id": "one", "worker": "w", "prompt_tokens": "3"}
        assert (two["id"], two["code"]) == ("two", "invalid_request")
        await eventually(lambda: is_idle(redis))
        counted = worker.service.metrics.calls
        assert counted.labels(outcome="answered")._value.get() == 3
        assert counted.labels(outcome="invalid_request")._value.get() == 1


async def test_a_full_worker_answers(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.hold()
    async with running_worker(redis_url, engine):
        for _ in range(3):
            await send(redis, prompt="x", max_tokens=5)
        await eventually(lambda: engine.prefilled)
        entry_id = await call(redis)
        assert (await answers(redis, entry_id))[0]["tokens"] == "97,98,99"
        assert len(engine.prefilled) == 1
        assert await redis.xlen(keys.requests("q")) == 3


async def test_a_slow_call_keeps_neither_requests_nor_other_calls_waiting(redis_url: str, redis: RedisClient) -> None:
    text = SlowText()
    async with running_worker(redis_url, text=text, max_body_bytes=1 << 20):
        await call(redis, prompt=SLOW, to="box")
        await eventually(lambda: text.num_begun)
        entry_id = await call(redis)
        assert (await answers(redis, entry_id))[0]["prompt_tokens"] == "3"
        await send(redis, prompt="x", id="r", max_tokens=2)
        await eventually(lambda: _has_ended(redis, "r"))
        text.go_on.set()
        assert len(await answers(redis, "box")) == 1


async def test_no_worker_has_more_calls_in_hand_than_it_answers_at_once(redis_url: str, redis: RedisClient) -> None:
    text, other = SlowText(), FakeText()
    async with running_worker(redis_url, text=text, name="full"):
        for _ in range(server.MAX_AT_ONCE + 5):
            await call(redis, prompt=SLOW, to="box")
        await eventually(lambda: text.num_begun)
        await eventually(lambda: _has_pending(redis, server.MAX_AT_ONCE))
        async with running_worker(redis_url, text=other, name="free"):
            first = await answers(redis, "box", 5)
            assert {answer["worker"] for answer in first} == {"free"}
        text.go_on.set()
        assert len(await answers(redis, "box", server.MAX_AT_ONCE + 5)) == server.MAX_AT_ONCE + 5
        await eventually(lambda: is_idle(redis))


async def test_a_call_of_a_killed_worker_is_answered_by_another(
    redis_url: str, redis: RedisClient, tmp_path: Path
) -> None:
    with WorkerProcess(redis_url, tmp_path / "log", name="victim") as victim:
        await answers(redis, await call(redis))
        await freeze_with_a_call(redis, victim)
        victim.kill()
        async with running_worker(redis_url, name="heir"):
            await eventually(lambda: is_idle(redis))
            assert (await answers(redis, "box"))[-1]["worker"] == "heir"
            await eventually(lambda: _is_forgotten(redis, "victim"))


async def test_a_frozen_worker_that_wakes_up_answers_nothing_twice(
    redis_url: str, redis: RedisClient, tmp_path: Path
) -> None:
    with WorkerProcess(redis_url, tmp_path / "log", name="zombie") as zombie:
        await answers(redis, await call(redis))
        await freeze_with_a_call(redis, zombie)
        async with running_worker(redis_url, name="heir") as heir:
            taken = await answers(redis, "box", 1)
            await eventually(lambda: is_idle(redis))
            zombie.send(signal.SIGCONT)
            await heir.drain()
        later = await call(redis)
        assert (await answers(redis, later))[0]["worker"] == "zombie"
        ids = [answer["id"] for answer in await answers(redis, "box", len(taken))]
        assert len(ids) == len(set(ids))


async def test_a_call_that_takes_workers_down_is_given_up(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_id = await call(redis, to="box", timeout_ms="60000")
    await redis.xgroup_create(CALLS, keys.GROUP, id="0")
    await redis.xreadgroup(keys.GROUP, "dead", {CALLS: ">"})
    await redis.execute_command(
        *("XCLAIM", CALLS, keys.GROUP, "dead", 0, entry_id, "IDLE", 60_000, "RETRYCOUNT", server.MAX_TRIES, "JUSTID")
    )
    async with running_worker(redis_url):
        (answer,) = await answers(redis, "box")
    assert (answer["code"], answer["message"]) == (
        "internal_error", f"{server.MAX_TRIES} workers took this call and did not get to an answer",
    )  # fmt: skip


async def test_a_worker_that_drains_answers_what_it_has_and_takes_no_more(redis_url: str, redis: RedisClient) -> None:
    text = SlowText()
    async with running_worker(redis_url, text=text) as worker:
        await call(redis, prompt=SLOW, to="box")
        await eventually(lambda: text.num_begun)
        await send(redis, prompt="x", id="r", max_tokens=10**5)  # so that it drains for a while
        worker.service.request_drain()
        text.go_on.set()
        assert len(await answers(redis, "box")) == 1
        await worker.task
    assert not await redis.exists(keys.serving("q"))
    await call(redis)
    assert await redis.xlen(CALLS) == 1


@pytest.mark.parametrize("loss", [("FLUSHALL",), ("DEL", CALLS), ("SET", CALLS, "junk")])
async def test_a_stream_that_was_lost_is_made_again(
    redis_url: str, redis: RedisClient, loss: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    async with running_worker(redis_url):
        await answers(redis, await call(redis))
        await redis.execute_command(*loss)
        if loss[0] == "SET":
            await eventually(lambda: "calls_unreadable" in capfd.readouterr().out)
            await redis.delete(CALLS)
        assert (await answers(redis, await call(redis)))[0]["prompt_tokens"] == "3"


async def test_calls_outlive_a_server_that_is_away(redis_url: str, redis: RedisClient) -> None:
    async with RedisProxy(redis_url) as proxy:
        text = SlowText()
        async with running_worker(proxy.url, text=text) as worker:
            await call(redis, prompt=SLOW, to="box", timeout_ms="60000")
            await eventually(lambda: text.num_begun)
            await proxy.stop()
            text.go_on.set()
            await eventually(lambda: not worker.service.readiness.is_ready)
            entry_id = await call(redis, timeout_ms="60000")
            await proxy.start()
            assert (await answers(redis, entry_id))[0]["prompt_tokens"] == "3"
            assert len(await answers(redis, "box")) == 1
            await eventually(lambda: is_idle(redis))


async def test_the_stream_is_kept_while_it_is_served_and_no_longer(redis_url: str, redis: RedisClient) -> None:
    await redis.xgroup_create(CALLS, keys.GROUP, id="0", mkstream=True)
    async with running_worker(redis_url):
        await redis.pexpire(CALLS, MAX_TIMEOUT_MS // 2)
        await eventually(lambda: _is_renewed(redis))
    assert 0 < await redis.pttl(CALLS) <= MAX_TIMEOUT_MS


async def test_what_was_added_where_nobody_served_is_dropped_by_the_first_worker(
    redis_url: str, redis: RedisClient
) -> None:
    for number in range(300):  # more than one script drops
        await redis.xadd(CALLS, {"call": "count_tokens", "prompt": "x"}, id=f"{number + 1}-0")
    assert await redis.pttl(CALLS) == -1
    async with running_worker(redis_url):
        await eventually(lambda: is_idle(redis))
    assert 0 < await redis.pttl(CALLS) <= MAX_TIMEOUT_MS
    assert await redis.keys(keys.answers("q", "*")) == []


async def _is_renewed(redis: RedisClient) -> bool:
    return int(await redis.pttl(CALLS)) > MAX_TIMEOUT_MS // 2


async def _has_ended(redis: RedisClient, request_id: str) -> bool:
    return await redis.hget(keys.state("q", request_id), "status") == "done"


async def _has_pending(redis: RedisClient, count: int) -> bool:
    return bool((await redis.xpending(CALLS, keys.GROUP))["pending"] == count)


async def _is_forgotten(redis: RedisClient, worker: str) -> bool:
    return worker not in {consumer["name"] for consumer in await redis.xinfo_consumers(CALLS, keys.GROUP)}

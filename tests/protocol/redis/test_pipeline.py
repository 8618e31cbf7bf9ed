"""Commands of many tasks are sent to the server together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis import exceptions
from redis.asyncio import RedisCluster

from penstock.protocol.redis import pipeline
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.protocol.redis.faults import UNREACHABLE
from penstock.protocol.redis.pipeline import MAX_PIPELINES, Batcher, Command
from tests.support.redis_servers.redis_proxy import RedisProxy


class Counted:
    """`pipeline.execute`, recording its arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[list[Command]] = []
        self._execute = pipeline.execute
        monkeypatch.setattr(pipeline, "execute", self)

    async def __call__(self, redis: RedisClient, commands: list[Command], *may_send: Any) -> list[Any]:
        self.batches.append(commands)
        return await self._execute(redis, commands, *may_send)


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[RedisProxy]:
    async with RedisProxy(redis_url) as proxy:
        yield proxy


async def test_commands_of_one_turn_go_together_and_each_asker_gets_its_answer(
    raw: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, batcher = Counted(monkeypatch), Batcher(raw, retries=0)
    answers = await asyncio.gather(*(batcher.execute("SET", f"k{i}", i, "GET") for i in range(50)))
    assert answers == [None] * 50
    answers = await asyncio.gather(*(batcher.execute("GET", f"k{i}") for i in range(50)))
    assert answers == [str(i).encode() for i in range(50)]
    assert [len(batch) for batch in counted.batches] == [50, 50]


async def test_an_error_is_raised_to_its_own_asker_alone(raw: RedisClient) -> None:
    batcher = Batcher(raw, retries=0)
    answers: tuple[Any, ...] = await asyncio.gather(
        batcher.execute("SET", "k", "v"), batcher.execute("LPUSH", "k", "v"), batcher.execute("GET", "none"),
        return_exceptions=True,
    )  # fmt: skip
    good, bad, none = answers
    assert good == b"OK"
    assert isinstance(bad, exceptions.ResponseError)
    assert none is None


async def test_where_there_is_nothing_to_send_nothing_is_written(
    raw: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.12 on, an empty write stays in the buffer of a connection: the loop is never idle again."""
    await raw.ping()
    written: list[int] = []
    monkeypatch.setattr(asyncio.StreamWriter, "writelines", lambda _, data: written.extend(map(len, data)))
    monkeypatch.setattr(asyncio.StreamWriter, "write", lambda _, data: written.append(len(data)))
    assert await pipeline.execute(raw, []) == []
    assert written == []


async def test_what_comes_while_pipelines_are_under_way_waits_and_goes_together(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RedisProxy(redis_url) as proxy:
        client = connect(proxy.url, decode=False)
        await client.ping()
        proxy.delay_s = 0.05
        counted, batcher = Counted(monkeypatch), Batcher(client, retries=0)
        askers = []
        for i in range(MAX_PIPELINES + 5):
            askers.append(asyncio.create_task(batcher.execute("INCR", "k")))
            await asyncio.sleep(0.005 if i < MAX_PIPELINES else 0)
        assert sorted(await asyncio.gather(*askers)) == list(range(1, MAX_PIPELINES + 6))
        assert [len(batch) for batch in counted.batches] == [1] * MAX_PIPELINES + [5]
        await client.aclose()


async def test_large_commands_are_spread_over_pipelines(raw: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, batcher = Counted(monkeypatch), Batcher(raw, retries=0)
    monkeypatch.setattr(pipeline, "BATCH_BYTES", 1000)
    await asyncio.gather(*(batcher.execute("SET", f"k{i}", "x" * 600) for i in range(5)))
    assert [len(batch) for batch in counted.batches] == [2, 2, 1]


async def test_a_lost_answer_is_asked_for_again(raw: RedisClient, proxy: RedisProxy) -> None:
    client = connect(proxy.url, decode=False)
    batcher = Batcher(client, retries=8)
    proxy.loss = 0.4
    await asyncio.gather(*(batcher.execute("SET", f"k{i}", "v") for i in range(20)))
    for i in range(20):
        await batcher.execute("SET", f"l{i}", "v")
    proxy.loss = 0.0
    assert proxy.num_lost
    assert await raw.dbsize() == 40
    await client.aclose()


async def test_without_retries_a_lost_answer_is_everybodys_error(proxy: RedisProxy) -> None:
    client = connect(proxy.url, decode=False, retries=0)
    await client.ping()
    proxy.loss = 1.0
    batcher = Batcher(client, retries=0)
    errors = await asyncio.gather(*(batcher.execute("PING") for _ in range(3)), return_exceptions=True)
    assert all(isinstance(error, UNREACHABLE) for error in errors)
    assert proxy.num_lost == 1
    proxy.loss = 0.0
    assert await batcher.execute("PING") == b"PONG"
    await client.aclose()


async def test_an_asker_that_goes_takes_nobody_with_it(raw: RedisClient) -> None:
    batcher = Batcher(raw, retries=0)
    gone, stays = asyncio.create_task(batcher.execute("PING")), asyncio.create_task(batcher.execute("PING"))
    await asyncio.sleep(0)
    gone.cancel()
    assert await stays == b"PONG"
    assert gone.cancelled()


@pytest.mark.parametrize("delay_s", [0.0, 0.05])  # before anything is sent, and after
async def test_closing_cancels_who_waits(proxy: RedisProxy, delay_s: float) -> None:
    client = connect(proxy.url, decode=False)
    await client.ping()
    proxy.delay_s = 10.0
    batcher = Batcher(client, retries=0)
    asker = asyncio.create_task(batcher.execute("PING"))
    await asyncio.sleep(delay_s)
    await batcher.close()
    with pytest.raises(asyncio.CancelledError):
        await asker
    proxy.delay_s = 0.0
    assert await batcher.execute("PING") == b"PONG"  # what comes later does not wait for a sender that is gone
    await client.aclose()


async def test_a_cluster_gets_each_command_where_its_keys_are(redis_cluster_url: str) -> None:
    client = connect(redis_cluster_url, decode=False)
    assert isinstance(client, RedisCluster)
    batcher = Batcher(client, retries=0)
    await asyncio.gather(*(batcher.execute("SET", f"k{i}", i) for i in range(20)))
    assert await asyncio.gather(*(batcher.execute("GET", f"k{i}") for i in range(20))) == [
        str(i).encode() for i in range(20)
    ]
    await client.aclose()


async def test_a_script_is_sent_whole_only_to_a_server_that_does_not_know_it(raw: RedisClient) -> None:
    double, fail = "return 2 * ARGV[1]", "return redis.error_reply('no')"
    commands: list[Command] = [("EVAL", double, 0, 21), ("SET", "k", "v"), ("EVAL", fail, 0), ("EVAL", double, 0, 4)]
    await raw.script_flush()
    await raw.config_resetstat()
    for _ in range(2):
        answers = await pipeline.execute(raw, commands)
        assert [answers[0], answers[1], answers[3]] == [42, b"OK", 8]
        assert isinstance(answers[2], exceptions.ResponseError)
    stats = await raw.info("commandstats")
    assert stats["cmdstat_eval"]["calls"] == 3
    assert stats["cmdstat_evalsha"]["calls"] == 6
    assert stats["cmdstat_set"]["calls"] == 2


async def test_a_script_that_only_reads_is_held_to_it(raw: RedisClient) -> None:
    await raw.set("k", "v")
    commands: list[Command] = [
        ("EVAL_RO", f"return redis.call({call})", 1, "k") for call in ("'GET', KEYS[1]", "'DEL', KEYS[1]")
    ]
    await raw.script_flush()
    await raw.config_resetstat()
    for _ in range(2):
        value, refusal = await pipeline.execute(raw, commands)
        assert value == b"v"
        assert "Write commands are not allowed" in str(refusal)
    assert (await raw.info("commandstats"))["cmdstat_evalsha_ro"]["calls"] == 4


async def test_a_cluster_too_gets_a_script_whole_only_where_it_is_not_known(redis_cluster_url: str) -> None:
    client = connect(redis_cluster_url, decode=False)
    assert isinstance(client, RedisCluster)
    batcher = Batcher(client, retries=0)
    commands: list[Command] = [("EVAL", "return {KEYS[1], ARGV[1]}", 1, f"k{i}", i) for i in range(20)]
    expected = [[f"k{i}".encode(), str(i).encode()] for i in range(20)]
    for send in (
        lambda: pipeline.execute(client, commands),
        lambda: asyncio.gather(*(batcher.execute(*command) for command in commands)),
    ):
        await client.execute_command("SCRIPT FLUSH", target_nodes=client.PRIMARIES)
        assert await send() == expected
        await client.execute_command("CONFIG RESETSTAT", target_nodes=client.PRIMARIES)
        assert await send() == expected
        stats = await client.info("commandstats", target_nodes=client.PRIMARIES)
        assert sum(node["cmdstat_evalsha"]["calls"] for node in stats.values()) == len(commands)
        assert not any("cmdstat_eval" in node for node in stats.values())
    with pytest.raises(exceptions.ResponseError, match="no"):
        await batcher.execute("EVAL", "return redis.error_reply('no')", 1, "k")
    await client.aclose()


async def test_a_server_that_is_silent_is_an_error_of_redis(raw: RedisClient) -> None:
    """Python's own TimeoutError would escape all code that waits for Redis to come back."""
    with pytest.raises(exceptions.TimeoutError, match=r"no answer within 0\.05 s"):
        await pipeline.execute(raw, [("BLPOP", "nothing", 0)], timeout_s=0.05)
    assert await pipeline.execute(raw, [("GET", "nothing")]) == [None]

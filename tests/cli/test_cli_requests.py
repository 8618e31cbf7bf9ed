"""`penstock requests` works over Redis, from anywhere."""

from __future__ import annotations

import asyncio
import json

import pytest
import typer

from penstock.cli import run
from penstock.producer import AsyncClient
from penstock.protocol import keys
from penstock.protocol.operations.collector import look
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine
from tests.support.patience import eventually
from tests.support.programs.worker_harness import read_reply, read_until, running_worker, send

SECRET = "a secret prompt"


async def penstock(redis_url: str, *arguments: str) -> int:
    return await asyncio.to_thread(run, ["requests", *arguments, "--redis-url", redis_url, "--queue", "q"])


def is_chunk(entry: object) -> bool:
    return getattr(entry, "type", None) == "chunk"


async def _runs(raw: RedisClient, *request_ids: str) -> bool:
    return {each.id for each in (await look(raw, "q")).running} == set(request_ids)


async def test_what_runs_and_what_waits(
    redis_url: str, redis: RedisClient, raw: RedisClient, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(max_num_seqs=2, step_s=0.01)
    async with running_worker(redis_url, engine, name="w0"):
        for request_id, tenant in (("a", "acme"), ("b", "other")):
            await send(redis, prompt=SECRET, id=request_id, tenant=tenant, max_tokens=10**6)
            await read_until(redis, request_id, is_chunk)
        entries = [await send(redis, prompt=SECRET, tenant="acme", priority=priority) for priority in (0, 5, 0)]
        await eventually(lambda: _runs(raw, "a", "b"))
        await eventually(lambda: _wait(redis, 3))

        capsys.readouterr()  # the worker's log
        assert await penstock(redis_url, "list", "--json") == 0
        out = capsys.readouterr().out
        assert [json.loads(line)["id"] for line in out.splitlines()] == ["a", "b"]
        assert await penstock(redis_url, "list", "--tenant", "other") == 0
        heading, row = capsys.readouterr().out.splitlines()[:2]
        assert heading.split()[:4] == ["request", "worker", "tenant", "phase"]
        assert row.split()[:4] == ["b", "w0", "other", "running"]
        assert await penstock(redis_url, "list", "--worker", "w1") == 0
        assert capsys.readouterr().out == "queue q has 2 running requests, none of them such\n"

        assert await penstock(redis_url, "list", "--waiting", "--json") == 0
        waiting = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [each["entry"] for each in waiting] == [entries[1], entries[0], entries[2]]
        assert [each["priority"] for each in waiting] == [5, 0, 0]
        assert {each["tenant"] for each in waiting} == {"acme"}
        assert await penstock(redis_url, "list", "--waiting", "--limit", "1") == 0
        assert capsys.readouterr().out.splitlines()[-1] == "1 of 3 waiting requests"
        assert await penstock(redis_url, "list", "--waiting", "--limit", str(2**63)) == 2
        assert "1000000" in capsys.readouterr().err
        assert await penstock(redis_url, "list", "--waiting", "--worker", "w0") == 2
        assert "waiting requests have no worker" in capsys.readouterr().err

        assert await penstock(redis_url, "show", entries[0]) == 0  # named no id of its own
        assert "state:          waiting" in capsys.readouterr().out
        assert await penstock(redis_url, "cancel", "--yes", entries[0], "a", "b") == 0
        told = [line for line in capsys.readouterr().out.splitlines() if "told to end" in line]
        assert told == [f"{entries[0]}: told to end (waiting)", *(f"{each}: told to end (running)" for each in "ab")]
        for request_id in ("a", "b", entries[0]):
            assert (await read_reply(redis, request_id)).end.finish_reason == "cancelled"


async def _wait(redis: RedisClient, count: int) -> bool:
    return int(await redis.zcard(keys.lane("q", "acme"))) == count


async def test_one_request_through_its_life(
    redis_url: str, redis: RedisClient, raw: RedisClient, capsys: pytest.CaptureFixture[str]
) -> None:
    async def shown(request_id: str) -> dict[str, object]:
        assert await penstock(redis_url, "show", request_id, "--json") == 0
        out = capsys.readouterr().out
        assert SECRET not in out
        document: dict[str, object] = json.loads(out.splitlines()[-1])
        return document

    async with AsyncClient(redis_url, queue="q") as client:
        handle = await client.submit(SECRET, max_tokens=10**6, tenant="acme")
        assert (await shown(handle.id))["state"] == "waiting"
        engine = FakeEngine(step_s=0.005)
        async with running_worker(redis_url, engine, name="w0", drain_timeout_s=0.01) as first:
            await anext(handle.stream())
            await eventually(lambda: _runs(raw, handle.id))
            now = await shown(handle.id)
            assert (now["state"], now["worker"], now["tenant"], now["takeovers"]) == ("running", "w0", "acme", 0)
            assert now["prompt_tokens"] == len(SECRET)
            await first.drain()
        assert (await shown(handle.id))["state"] == "waiting"  # it was handed back
        async with running_worker(redis_url, FakeEngine(step_s=0.005), name="w1"):
            await eventually(lambda: _runs(raw, handle.id))
            now = await shown(handle.id)
            assert (now["worker"], now["takeovers"], now["handbacks"]) == ("w1", 1, 1)
            await handle.cancel()
            await handle.result()
            ended = await shown(handle.id)
            assert (ended["state"], ended["finish_reason"]) == ("ended", "cancelled")
            assert [claim["worker"] for claim in ended["claims"]] == ["w0", "w1"]  # type: ignore[attr-defined]
            assert await penstock(redis_url, "cancel", "-y", handle.id) == 1
            assert "has ended (cancelled)" in capsys.readouterr().err


async def test_a_dead_worker_s_request_is_lost_until_somebody_has_it(
    redis_url: str, redis: RedisClient, capsys: pytest.CaptureFixture[str]
) -> None:
    await redis.xgroup_create(keys.requests("q"), keys.GROUP, id="0", mkstream=True)
    entry = await send(redis, prompt="x", id="r")
    await redis.xreadgroup(keys.GROUP, "dead", {keys.requests("q"): ">"})
    await redis.hset(keys.state("q", "r"), mapping={"status": "running", "worker": "dead", "entry": entry})
    assert await penstock(redis_url, "show", "r") == 0
    assert "state:          lost" in capsys.readouterr().out


async def test_what_nobody_knows_is_flagged_all_the_same(
    redis_url: str, redis: RedisClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await penstock(redis_url, "show", "nobody") == 1
    assert "knows of no request 'nobody'" in capsys.readouterr().err
    await send(redis, prompt="x", id="own")  # by hand: nothing says under which id it waits
    assert await penstock(redis_url, "cancel", "--yes", "own") == 1
    async with running_worker(redis_url):
        assert (await read_reply(redis, "own")).end.finish_reason == "cancelled"


async def test_nothing_is_cancelled_without_a_yes(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("typer.confirm", _says_no)
    assert await penstock(redis_url, "cancel", "r") == 1
    assert not await redis.exists(keys.cancel("q", "r"))
    assert await penstock(redis_url, "cancel", "no id at all", "--yes") == 2
    assert "is not the ID of a request" in capsys.readouterr().err


def _says_no(text: str, *, abort: bool) -> None:
    assert text == "cancel request r of queue q?"
    assert abort

    raise typer.Abort

"""`penstock tenants` works over Redis, from anywhere."""

from __future__ import annotations

import asyncio
import json

import pytest

from penstock.cli import run
from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient
from tests.support.programs.worker_harness import send


async def penstock(redis_url: str, *arguments: str) -> int:
    return await asyncio.to_thread(run, ["tenants", *arguments, "--redis-url", redis_url, "--queue", "q"])


async def test_who_waits_and_with_what_weight(
    redis_url: str, redis: RedisClient, raw: RedisClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await penstock(redis_url, "list") == 0
    assert capsys.readouterr().out == "nobody waits in queue q, and no tenant has a weight\n"
    assert await penstock(redis_url, "weight", "acme", "2.5") == 0
    assert capsys.readouterr().out == "acme has weight 2.5 in queue q\n"
    await redis.xgroup_create(keys.requests("q"), keys.GROUP, id="0", mkstream=True)
    for tenant in ("acme", "acme", "other"):
        await send(redis, prompt="x" * 100, tenant=tenant, priority=3)
    await send(redis, prompt="x" * 100)
    command = scripts.take("q", worker="w", count=1, max_body_bytes=1000, max_bytes=1000)
    await raw.execute_command(*command)
    assert await penstock(redis_url, "list", "--json") == 0
    found = {each["name"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {name: (each["num_waiting"], each["priority"]) for name, each in found.items()} == {
        "": (1, 0), "acme": (1, 3), "other": (1, 3),
    }  # fmt: skip
    assert found["acme"]["weight"] == 2.5
    assert found["acme"]["served"] == pytest.approx(32 / 2.5)  # 125 bytes
    assert await penstock(redis_url, "list") == 0
    assert "(none)" in capsys.readouterr().out
    assert await penstock(redis_url, "weight", "acme", "1") == 0
    assert not await redis.hexists(keys.weights("q"), "acme")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("weight", "a b", "2"), "'a b' is not a tenant"),
        (("weight", "acme", "0"), "Input should be greater than or equal to 0.001"),
        (("weight", "acme", "nan"), "equal to 1000"),
    ],
)
async def test_what_is_no_weight_is_refused(
    redis_url: str, arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await penstock(redis_url, *arguments) == 2
    assert told in capsys.readouterr().err

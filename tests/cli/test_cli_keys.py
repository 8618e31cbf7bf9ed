"""`penstock keys` works over Redis, from anywhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from penstock.cli import run
from penstock.gateway.keys.secrets import parse_secret
from penstock.gateway.store import names
from penstock.protocol.redis.connection import RedisClient

Capture = pytest.CaptureFixture[str]


async def keys(redis_url: str, *arguments: str) -> int:
    return await asyncio.to_thread(run, ["keys", *arguments, "--redis-url", redis_url])


async def created(redis_url: str, capsys: Capture, *options: str) -> Mapping[str, Any]:
    assert await keys(redis_url, "create", "--json", *options) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


async def listed(redis_url: str, capsys: Capture) -> list[Mapping[str, Any]]:
    assert await keys(redis_url, "list", "--json") == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


async def test_a_key_is_shown_once_and_its_hash_kept(redis_url: str, redis: RedisClient, capsys: Capture) -> None:
    assert await keys(redis_url, "create", "--name", "app") == 0
    out, err = capsys.readouterr()
    secret = parse_secret(out.strip())
    assert secret is not None
    assert (out.count("\n"), err) == (1, f"created key {secret.key_id}; it is not shown again:\n")
    kept = json.dumps(await redis.hgetall(names.api_keys()))
    assert secret.digest in kept
    assert secret.text[-43:] not in kept
    assert await keys(redis_url, "list") == 0
    assert secret.text not in capsys.readouterr().out


async def test_what_a_key_is_for_is_listed(redis_url: str, capsys: Capture) -> None:
    options = "--name app --tenant acme --model b --model a --requests-per-minute 6 --tokens-per-minute 700"
    made = await created(redis_url, capsys, *options.split(), "--max-concurrent", "2", "--expires-in", "1h")
    [found] = await listed(redis_url, capsys)
    assert {name: made[name] for name in made if name != "secret"} == {
        name: found[name] for name in found if name not in ("state", "problem", "revoked_at")
    }
    assert found["models"] == ["a", "b"]
    limits = [found[name] for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent")]
    assert (found["state"], found["tenant"], limits) == ("active", "acme", [6, 700, 2])
    assert await keys(redis_url, "list") == 0
    assert "6 requests/min, 700 tokens/min, 2 at once" in capsys.readouterr().out


async def test_a_revoked_key_stays_in_the_list(redis_url: str, capsys: Capture) -> None:
    made = await created(redis_url, capsys)
    assert await keys(redis_url, "revoke", made["id"]) == 0
    assert capsys.readouterr().out == f"{made['id']}: revoked\n"
    assert await keys(redis_url, "revoke", made["id"]) == 0
    assert capsys.readouterr().out == f"{made['id']}: revoked before\n"
    [found] = await listed(redis_url, capsys)
    assert found["state"] == "revoked"
    assert found["revoked_at"] is not None


async def test_a_key_that_is_revoked_by_its_name_again_was_revoked_before(redis_url: str, capsys: Capture) -> None:
    made = await created(redis_url, capsys, "--name", "app")
    assert await keys(redis_url, "revoke", "app") == 0
    assert capsys.readouterr().out == f"{made['id']}: revoked\n"
    assert await keys(redis_url, "revoke", "app") == 0
    assert capsys.readouterr().out == f"{made['id']}: revoked before\n"


async def test_a_key_is_revoked_by_its_name_unless_others_have_it(redis_url: str, capsys: Capture) -> None:
    first = await created(redis_url, capsys, "--name", "app")
    second = await created(redis_url, capsys, "--name", "app")
    assert await keys(redis_url, "revoke", "app") == 1
    assert "several keys are called 'app'" in capsys.readouterr().err
    assert await keys(redis_url, "revoke", first["id"]) == 0
    assert await keys(redis_url, "revoke", "app", "nobody") == 1
    assert "there is no key 'nobody'" in capsys.readouterr().err
    states = {each["id"]: each["state"] for each in await listed(redis_url, capsys)}
    assert states == {first["id"]: "revoked", second["id"]: "active"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tenant", "a b"), "tenant"),
        (("--name", "a b"), "name"),
        (("--requests-per-minute", "0"), "requests-per-minute"),
        (("--expires-in", "soon"), "'soon' is not a time such as 90m, 12h or 7d"),
    ],
)
async def test_a_mistake_is_named(redis_url: str, capsys: Capture, options: tuple[str, ...], message: str) -> None:
    assert await keys(redis_url, "create", *options) == 2
    assert message in capsys.readouterr().err


async def test_no_keys_and_one_that_cannot_be_read(redis_url: str, redis: RedisClient, capsys: Capture) -> None:
    assert await keys(redis_url, "list") == 0
    assert capsys.readouterr().out == "there are no keys: the gateway answers everybody\n"
    made = await created(redis_url, capsys)
    record = json.loads(str(await redis.hget(names.api_keys(), made["id"])))
    await redis.hset(names.api_keys(), made["id"], json.dumps({**record, "only_on_mondays": True}))
    [found] = await listed(redis_url, capsys)
    assert (found["state"], found["problem"]) == ("unreadable", "this version can't read only_on_mondays")
    assert await keys(redis_url, "list") == 0
    assert "only_on_mondays" in capsys.readouterr().out

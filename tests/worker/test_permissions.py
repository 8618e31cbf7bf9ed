"""A worker's role may do what the worker needs, and missing permissions are named."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from penstock.protocol.redis.connection import RedisClient, connect
from penstock.worker.errors import RedisRefused
from penstock.worker.redis.permissions import check_permissions, denied
from tests.support.packages import ROOT

pytestmark = pytest.mark.every_server

USERS = ROOT / "deploy/redis/users.acl"

MakeUser = Callable[..., Awaitable[RedisClient]]


def rules_of(role: str) -> list[str]:
    line = next(line for line in USERS.read_text().splitlines() if line.startswith(f"user {role} on "))
    return re.findall(r"\([^)]*\)|\S+", line.partition(" on ")[2])


@pytest.fixture
async def user(redis: RedisClient, redis_url: str) -> AsyncIterator[MakeUser]:
    """Function that makes a user with the given rules, and a connection of that user."""
    made: list[RedisClient] = []

    async def make(*rules: str) -> RedisClient:
        await redis.execute_command("ACL", "SETUSER", "probe", "reset", "on", ">secret", *rules)
        made.append(connect(redis_url.replace("://", "://probe:secret@"), decode=False, retries=0))
        return made[-1]

    yield make
    for client in made:
        await client.aclose()
    await redis.execute_command("ACL", "DELUSER", "probe")


async def test_the_worker_s_role_has_all_and_nothing_is_done_to_find_out(user: MakeUser, redis: RedisClient) -> None:
    worker = await user(*rules_of("worker"))
    assert await denied(worker, "q") == []
    await check_permissions(worker, "q")
    assert await redis.keys("*") == []


async def test_each_command_of_the_role_is_asked_about(user: MakeUser) -> None:
    """Otherwise a worker would start without it, and fail with its first requests."""
    rules = rules_of("worker")
    commands = {
        word[1:] for rule in rules if rule.startswith("(") for word in rule.strip("()").split() if word[0] == "+"
    }
    everything = await denied(await user("+eval"), "q")
    asked = {name.partition(" on ")[0].lower().replace(" ", "|") for name in everything}
    assert asked == commands | {"time"}


async def test_what_is_missing_is_named(user: MakeUser) -> None:
    worker = await user("~*", "+@all", "-xack", "-hincrby")
    assert await denied(worker, "q") == [
        "XACK on penstock:{q}:requests", "HINCRBY on penstock:{q}:lanes:backlog",
        "XACK on penstock:{q}:lanes:nudges:penstock-probe", "XACK on penstock:{q}:calls",
        "HINCRBY on penstock:q:{penstock-probe}:state",
    ]  # fmt: skip
    with pytest.raises(RedisRefused, match=r"XACK on penstock:\{q\}:requests, HINCRBY on .*users\.acl"):
        await check_permissions(worker, "q")


async def test_a_user_of_another_queue_is_refused(user: MakeUser) -> None:
    worker = await user("~penstock:{other}:*", "~penstock:other:*", "+@all")
    with pytest.raises(RedisRefused, match=r"and \d+ more"):
        await check_permissions(worker, "q")

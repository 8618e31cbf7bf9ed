"""`penstock doctor` sees that Redis takes no writes, or soon will take none, and why."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from penstock.cli.checks import Finding
from penstock.cli.checks.redis import check_redis
from penstock.cli.checks.redis_writes import check_state
from penstock.local.embedded import EmbeddedServer
from penstock.protocol.redis.connection import RedisClient, connect
from tests.cli.cli_process import command
from tests.support.packages import ROOT
from tests.support.patience import eventually
from tests.support.redis_servers.redis_proxy import RedisProxy
from tests.support.redis_servers.refusing_proxy import FULL, PASSING, REFUSED, RefusingProxy

USERS = ROOT / "deploy/redis/users.acl"
ROLES = re.findall(r"^user (\w+) on resetkeys", USERS.read_text(), re.MULTILINE)

Change = Callable[[RedisClient], Awaitable[object]]


SERVERS: Mapping[str, tuple[Change, Change, dict[str, str], str]] = {
    "good": (lambda redis: redis.ping(), lambda redis: redis.ping(), {}, ""),
    "too few replicas": (
        lambda redis: redis.config_set("min-replicas-to-write", 1),
        lambda redis: redis.config_set("min-replicas-to-write", 0),
        {"replicas": "fail", "writes": "fail"},
        "NOREPLICAS",
    ),
    "full memory": (
        lambda redis: redis.config_set("maxmemory", 1),
        lambda redis: redis.config_set("maxmemory", 0),
        {"memory": "fail", "writes": "fail"},
        "OOM",
    ),
    "a replica": (
        lambda redis: redis.execute_command("REPLICAOF", "127.0.0.1", 1),
        lambda redis: redis.execute_command("REPLICAOF", "NO", "ONE"),
        {"role": "fail", "writes": "fail"},
        "READONLY",
    ),
}
"""Changes that bring a server to a state and back, the findings other than good, and the code of refused writes."""


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def about_writes(found: dict[str, Finding]) -> dict[str, str]:
    names = ("loading", "disk", "memory", "replicas", "role", "writes", "settings")
    return {name: found[name].status for name in names if name in found and found[name].status != "ok"}


@pytest.mark.every_server
@pytest.mark.parametrize("case", SERVERS)
async def test_a_server_that_takes_no_writes_fails_with_what_to_do(
    redis: RedisClient, redis_url: str, case: str
) -> None:
    begin, end, expected, code = SERVERS[case]
    await begin(redis)
    try:
        found = by_name(await check_redis(redis_url, "q"))
    finally:
        await end(redis)
    assert about_writes(found) == expected
    assert code in found["writes"].detail
    assert all(finding.fix for finding in found.values() if finding.status != "ok")
    assert "queue" in found  # it went on
    assert await redis.keys("*") == []


@pytest.mark.every_server
async def test_a_snapshot_that_failed_is_a_full_disk(tmp_path: Path) -> None:
    with EmbeddedServer(data_dir=tmp_path) as server:
        redis = connect(server.url, decode=True)
        (tmp_path / "dump.rdb").mkdir()
        await redis.config_set("save", "3600 1")
        await redis.bgsave()

        async def has_failed() -> bool:
            return bool((await redis.info("persistence"))["rdb_last_bgsave_status"] == "err")

        await eventually(has_failed)
        found = by_name(await check_redis(server.url, "q"))
        assert about_writes(found) == {"disk": "fail", "writes": "fail"}
        assert "MISCONF" in found["writes"].detail
        assert "make space" in found["writes"].fix
        await redis.config_set("stop-writes-on-bgsave-error", "no")
        assert about_writes(by_name(await check_redis(server.url, "q"))) == {"disk": "warn"}
        await redis.config_set("save", "")  # otherwise it would not end before it has saved
        await redis.aclose()


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ({"aof_enabled": 1, "aof_last_write_status": "ok"}, "ok"),
        ({"aof_enabled": 1, "aof_last_write_status": "err"}, "fail"),
        ({"aof_enabled": 0, "aof_last_write_status": "err"}, "ok"),
        ({"aof_enabled": 1, "aof_last_bgrewrite_status": "err"}, "warn"),
    ],
)
async def test_an_append_only_file_that_cannot_be_written(
    redis: RedisClient, said: dict[str, object], status: str
) -> None:
    info = {**await redis.info(), **said}
    assert by_name(await check_state(redis, info, "here"))["disk"].status == status


@pytest.mark.parametrize(
    ("used", "limit", "status"), [(50, 0, "ok"), (50, 100, "ok"), (95, 100, "warn"), (100, 100, "fail")]
)
async def test_memory_is_held_against_its_limit(redis: RedisClient, used: int, limit: int, status: str) -> None:
    info = {**await redis.info(), "used_memory": used + 7, "mem_not_counted_for_evict": 7, "maxmemory": limit}
    assert by_name(await check_state(redis, info, "here"))["memory"].status == status


async def test_a_server_that_still_loads(redis: RedisClient) -> None:
    info = {**await redis.info(), "loading": 1, "loading_loaded_perc": 12.5}
    found = by_name(await check_state(redis, info, "here"))["loading"]
    assert (found.status, "12.5 %" in found.detail) == ("warn", True)


@pytest.fixture
async def make_user(redis: RedisClient) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    async def make(*rules: str) -> None:
        await redis.execute_command("ACL", "SETUSER", "probe", "reset", "on", ">secret", *rules)

    yield make
    await redis.execute_command("ACL", "DELUSER", "probe")


@pytest.mark.every_server
@pytest.mark.parametrize("role", ROLES)
async def test_each_role_tries_a_write_that_it_may_do(
    redis: RedisClient, redis_url: str, make_user: Callable[..., Awaitable[None]], role: str
) -> None:
    line = next(line for line in USERS.read_text().splitlines() if line.startswith(f"user {role} on "))
    await make_user(*re.findall(r"\([^)]*\)|\S+", line.partition(" on ")[2]))
    url = redis_url.replace("://", "://probe:secret@")
    writes = role not in ("reader", "autoscaler")
    assert by_name(await check_redis(url, "q"))["writes"].status == ("ok" if writes else "warn")
    await redis.config_set("min-replicas-to-write", 1)
    try:
        found = by_name(await check_redis(url, "q"))
    finally:
        await redis.config_set("min-replicas-to-write", 0)
    assert found["writes"].status == ("fail" if writes else "warn")
    if found["redis"].detail.startswith("this user may not look"):
        assert "memory" not in found
    else:  # INFO it may read: what CONFIG would say is not known
        assert (found["settings"].status, found["replicas"].status) == ("warn", "fail")


@pytest.mark.parametrize("code", [*PASSING, *REFUSED, "max clients"])
@pytest.mark.parametrize("names", [(), ("SET",)], ids=["all", "writes"])
async def test_whatever_it_is_answered_it_says_so_and_ends(redis_url: str, code: str, names: tuple[str, ...]) -> None:
    async with RefusingProxy(redis_url) as proxy:
        if code in PASSING or code in REFUSED:
            proxy.refuse({**PASSING, **REFUSED}[code], *names)
        else:
            proxy.greeting = FULL
        outcome = await asyncio.to_thread(command, "doctor", REDIS_URL=proxy.url)
    assert "Traceback" not in outcome.out + outcome.err
    lines = outcome.out.splitlines()
    shown = [line for line in lines if line.startswith(("fail", "warn")) and _words(code) in line]
    assert shown, outcome.out
    assert outcome.status == (0 if code in ("NOPERM", "script") else 1)


def _words(code: str) -> str:
    return {"max clients": "max number of clients", "script": "ACL failure"}.get(code, code)


async def test_a_server_that_answers_nothing_is_told_apart(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.protocol.redis.connection.COMMAND_TIMEOUT_S", 0.2)
    async with RedisProxy(redis_url) as proxy:
        proxy.is_answering.clear()
        (found,) = await check_redis(proxy.url, "q")
        proxy.is_answering.set()
    assert (found.status, "did not answer" in found.detail) == ("fail", True)


async def test_each_primary_of_a_cluster_is_tried(redis_cluster_url: str) -> None:
    found = [finding for finding in await check_redis(redis_cluster_url, "q") if finding.name == "writes"]
    assert [finding.status for finding in found] == ["ok"] * 3
    assert len({finding.detail for finding in found}) == 3

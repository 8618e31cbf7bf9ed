"""The tables of keys say what keys of each kind take of a server's memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import pytest

from penstock.gateway.store import key_table as gateway_table
from penstock.gateway.store import names
from penstock.producer import AsyncClient
from penstock.protocol import key_table, keys
from penstock.protocol.key_kinds import KeyKind
from penstock.protocol.operations.tenants import set_weight
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine
from tests.support.letters import add_letter
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.gateway_client import CHAT, Asked, chat
from tests.support.programs.gateway_harness import new_key, revoke
from tests.support.programs.worker_harness import running_worker, send

KINDS = {kind.make: kind for kind in (*key_table.TABLE, *gateway_table.TABLE)}
LEAST, MOST = 0.5, 2.0
"""Measured bytes over declared ones. Servers and allocators round up differently, and a collection of a hundred takes
half as much for each member as one of thousands.
"""

Make: TypeAlias = Callable[..., str]
Counts: TypeAlias = Mapping[str, int]
Write: TypeAlias = Callable[[RedisClient, str], Any]

ONE = {"fleet": 1, "queue": 1, "worker": 1, "client": 1}
WAITING, RUNNING, TENANTS, PROMPT = 320, 16, 2, "x" * 1000
TOKENS = [400] * RUNNING + [4] * WAITING
BEGUN: tuple[Make, ...] = (
    keys.requests, keys.lane, keys.band, keys.bands, keys.weights, keys.charged, keys.due, keys.backlog, keys.load,
    keys.workers, keys.room, keys.named, keys.seen, keys.heartbeat, keys.serving, keys.card, keys.queues, keys.report,
    keys.reports, keys.reply, keys.state, keys.asked, keys.alike, keys.lapses,
)  # fmt: skip
ENDED: tuple[Make, ...] = (keys.seen, keys.service, keys.reply, keys.state)
LETTERS: tuple[Make, ...] = (keys.dead, keys.malformed, keys.letter_sizes, keys.letter_bytes)
BATCHES, LINES, RESPONSES = 3, 20, 20
STORED: tuple[Make, ...] = (
    names.api_keys, names.revocations, names.revocation_notices, names.key_charges, names.record, names.owned,
    names.body, names.batch_progress, names.ledger_sizes, names.ledger_expiries, names.fingerprint,
)  # fmt: skip
ANSWERING: tuple[Make, ...] = (names.key_open, names.unsettled, names.readers)


def many(number: int, beginning: str) -> list[str]:
    return [f"{beginning}{place:04}" for place in range(number)]


def string(text: str) -> Write:
    return lambda redis, key: redis.set(key, text)


def stream(**fields: str) -> Write:
    return lambda redis, key: redis.xadd(key, fields)  # type: ignore[arg-type]


def zset(members: list[str]) -> Write:
    return lambda redis, key: redis.zadd(key, dict.fromkeys(members, 1795790984764.0))


def pairs(members: list[str], value: str) -> Write:
    return lambda redis, key: redis.hset(key, mapping=dict.fromkeys(members, value))


IDS = many(200, "rA9XlZ2Rfj0NQMxKcfevK")
ENTRIES = many(200, "1795790984764-")
PROCESS = "1795790984764-0123456789abcdef"
RUNS = many(200, "batch_98b0f4d94af356f5c561ceac4478")
SECONDS = many(60, "179579")
WRITTEN: dict[Make, tuple[Counts, Write]] = {
    keys.passed: ({"held": 200}, zset(ENTRIES)),
    keys.homes: (ONE, pairs(many(1024, ""), "worker-0-123-abcdef")),
    keys.nudges: (ONE, stream(look="again")),
    keys.aside: ({"held": 200}, zset(ENTRIES)),
    keys.orphaned: ({"held": 200}, zset(ENTRIES)),
    keys.looked: (ONE, string("worker-0-123-abcdef")),
    keys.digests: ({"queue": 1, "worker": 100}, pairs(many(100, "worker-0-123-"), "0123456789abcdef0123456789abcdef")),
    keys.cancelled: ({"cancelled": 200}, lambda redis, key: redis.sadd(key, *IDS)),
    keys.calls: (ONE, lambda redis, key: redis.xgroup_create(key, keys.GROUP, mkstream=True)),
    keys.answers: (ONE, stream(call="rA9XlZ2Rfj0NQMxKcfevK0001", tokens="17")),
    keys.starting: (ONE, string(PROCESS)),
    keys.drain: (ONE, string(PROCESS)),
    keys.cancel: ({"cancelled": 1}, string("1")),
    keys.wake: (ONE, stream(wake="1")),
    names.key_requests: ({"api_key": 1}, pairs(SECONDS, "7")),
    names.key_running: ({"answering": 200}, zset(IDS)),
    names.key_tokens: ({"api_key": 1}, pairs(SECONDS, "1234")),
    names.file_users: ({"batch": 1}, zset(["batch_98b0f4d94af356f5c561ceac447894fe"])),
    names.batch_leases: ({"fleet": 1, "batch": 200}, zset(RUNS)),
    names.batch_holders: ({"fleet": 1, "batch": 200}, pairs(RUNS, "1234")),
    names.swept: (ONE, string("1795790984764")),
    names.probe: (ONE, string("1")),
}
"""Keys of special cases, and of moments that a test cannot wait for: written as the code writes them."""


def kind_of(key: str, type_: str) -> KeyKind:
    """Returns the kind whose pattern says most about a key."""
    kinds = [kind for kind in KINDS.values() if kind.type == type_ and any(fnmatchcase(key, p) for p in kind.patterns)]
    return max(kinds, key=lambda kind: max(map(len, kind.patterns)))


async def content(redis: RedisClient, kind: KeyKind, key: str) -> int:
    """Returns the bytes of a key that clients sent."""
    if kind.make is names.record:
        return int(await redis.strlen(key))
    if kind.make is names.body:
        return sum(map(len, await redis.hvals(key)))
    return int(await redis.xlen(key)) * len(PROMPT) if kind.make is keys.requests else 0


async def measured(redis: RedisClient) -> dict[Make, int]:
    """Returns the bytes of all keys of each kind, without what clients sent."""
    found: dict[Make, int] = {}
    for key in map(str, await redis.keys("*")):
        type_, taken = await redis.type(key), await redis.memory_usage(key, samples=0)
        if type_ != "none" and taken is not None:  # it may have expired
            kind = kind_of(key, str(type_))
            found[kind.make] = found.get(kind.make, 0) + taken - await content(redis, kind, key)
    return found


async def fit(redis: RedisClient, makes: tuple[Make, ...], **counts: int) -> None:
    """Waits until keys of these kinds take what the tables declare for so many of each."""
    off: dict[str, tuple[int, int]] = {}

    async def all_fit() -> bool:
        sizes = await measured(redis)
        pairs_of = {make.__name__: (sizes.get(make, 0), KINDS[make].size.times(**counts)) for make in makes}
        off.clear()
        off.update({name: pair for name, pair in pairs_of.items() if not LEAST <= pair[0] / pair[1] <= MOST})
        return not off

    try:
        await eventually(all_fit)
    except AssertionError:
        pytest.fail(f"measured and declared bytes: {off}")


def test_each_kind_is_measured() -> None:
    assert {*BEGUN, *ENDED, *LETTERS, *STORED, *ANSWERING, *WRITTEN} == set(KINDS)


async def test_requests_and_replies_take_what_is_declared(redis_url: str, redis: RedisClient, raw: RedisClient) -> None:
    engine = FakeEngine(max_num_seqs=RUNNING, step_s=0.002)
    async with (
        running_worker(redis_url, engine, name="worker-0-123-abcdef", heartbeat_ttl_s=10.0) as worker,
        AsyncClient(redis_url, queue="q") as client,
    ):
        engine.hold()
        handles = [
            await client.submit(
                PROMPT, max_tokens=count, timeout_s=3600, tenant=f"tenant-{place % TENANTS}", priority=place % 2
            )
            for place, count in enumerate(TOKENS)
        ]
        await set_weight(raw, "q", "tenant-1", 2.0)
        *others, last = handles
        await last.cancel()
        counts = {"request": WAITING + RUNNING, "running": RUNNING, "tenant": TENANTS, "cancelled": 1}
        await fit(redis, BEGUN, **ONE, **counts, remembered=WAITING + RUNNING, reply=RUNNING)
        engine.allow()
        await asyncio.wait_for(asyncio.gather(*(handle.result() for handle in others)), WAIT_S)
        counts = {"tenant": TENANTS, "remembered": WAITING + RUNNING, "reply": WAITING + RUNNING}
        await fit(redis, ENDED, **ONE, **counts, token=sum(TOKENS))
        assert not worker.task.done()


async def test_letters_take_what_is_declared(redis_url: str, redis: RedisClient) -> None:
    async with running_worker(redis_url):
        for place in range(50):
            await send(redis, nonsense="x", id=f"x{place}")
            await add_letter(redis, f"y{place}", prompt="x" * 100)
        await fit(redis, LETTERS, **ONE, letter=50, malformed=50)


async def test_what_gateways_keep_takes_what_is_declared(redis_url: str, redis: RedisClient) -> None:
    limits = {"requests_per_minute": 10**6, "tokens_per_minute": 10**9, "max_concurrent": 100}
    secret = await new_key(redis_url, limits=limits)
    await revoke(redis_url, await new_key(redis_url))
    async with (
        running_worker(redis_url, queue="default") as worker,
        Asked.beside(None, redis, redis_url, secret.text) as asked,
    ):
        http, headers = asked.http, {"authorization": f"Bearer {secret.text}"}
        for place in range(RESPONSES):
            body = {"model": "default", "input": PROMPT, "max_output_tokens": 9}
            (await http.post("/v1/responses", headers=headers, json=body)).raise_for_status()
            repeatable = {**headers, "idempotency-key": f"key-{place}"}
            (await http.post(CHAT, headers=repeatable, json=chat(max_tokens=9))).raise_for_status()
        line: dict[str, Any] = {"method": "POST", "url": CHAT, "body": chat(max_tokens=9)}
        lines = "".join(json.dumps({**line, "custom_id": f"line-{place}"}) + "\n" for place in range(LINES)).encode()
        files = [await asked.openai.files.create(file=("in.jsonl", lines), purpose="batch") for _ in range(BATCHES)]
        for file in files:
            await asked.openai.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        counts = {"api_key": 2, "revoked": 1, "repeatable": RESPONSES, "batch": BATCHES}
        results = {"line": BATCHES * LINES, "file": 3 * BATCHES, "document": 3 * BATCHES + RESPONSES}
        await fit(redis, STORED, **ONE, **counts, **results, charged=BATCHES * LINES + 2 * RESPONSES)
        worker.engine.hold()
        asking = [asyncio.create_task(http.post(CHAT, headers=headers, json=chat(max_tokens=9))) for _ in range(8)]
        await fit(redis, ANSWERING, **ONE, api_key=1, answering=8)
        worker.engine.allow()
        await asyncio.wait_for(asyncio.gather(*asking), WAIT_S)


@pytest.mark.parametrize("make", WRITTEN, ids=lambda make: make.__name__)
async def test_keys_of_moments_take_what_is_declared(redis: RedisClient, make: Make) -> None:
    counts, write = WRITTEN[make]
    key = KINDS[make].key(
        queue="default", tenant="tenant-1", worker="worker-0-123-abcdef", kind="0123456789abcdef",
        request_id=IDS[0], mailbox=IDS[0], client_id=IDS[0], key_id="97278b91dcc3", file_id="file-0123456789abcdef",
        name="probe",
    )  # fmt: skip
    await write(redis, key)
    size, declared = await redis.memory_usage(key, samples=0) or 0, KINDS[make].size.times(**counts)
    assert LEAST <= size / declared <= MOST, (size, declared)

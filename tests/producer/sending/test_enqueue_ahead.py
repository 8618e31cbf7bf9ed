"""A request that would expire before its turn is refused at once, with its estimated wait."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.producer import AsyncClient, QueueFull, ServerRefused
from penstock.protocol import keys, scripts
from penstock.protocol.queue.enqueue import Added, Full, Late, enqueue
from penstock.protocol.queue.load import QueueLoad, query_load
from penstock.protocol.redis.connection import RedisClient, ensure_group
from penstock.protocol.scripts import WorkerCapacity
from tests.support.redis_servers.streams import add_entry

pytestmark = pytest.mark.every_server

STREAM = keys.requests("q")
LIMITS: dict[str, Any] = {"max_body_bytes": 10_000, "max_bytes": 10**6}
RATE = 100  # tokens per second, of the one worker
TOKENS = 50  # each waiting request has 40 bytes of names and values, and 40 tokens of a reply


async def wait_in_line(
    redis: RedisClient, count: int, *, tenant: str = "t", priority: int = 0, timeout_s: str = "1"
) -> None:
    """Adds requests to which a worker gives places; they are due before most others."""
    await ensure_group(redis, "q")
    fields = {"tenant": tenant, "priority": str(priority), "timeout_s": timeout_s}
    fields["prompt"] = "x" * (40 - sum(len(name) + len(value) for name, value in fields.items()) - len("prompt"))
    for _ in range(count):
        await add_entry(redis, STREAM, fields)
    for _ in range(1 + count // 256):
        await redis.execute_command(*scripts.take("q", worker="w", count=0, **LIMITS))


async def measure(redis: RedisClient, part: WorkerCapacity | None = None) -> None:
    await redis.delete(keys.load("q"))
    part = part or WorkerCapacity(slots=4, tokens_per_s=RATE, reply_tokens=40, token_bytes=4)
    await redis.execute_command(*scripts.say("q", worker="w", part=part, every_ms=1000))
    await redis.execute_command(*scripts.measure("q", every_ms=1000, target_s=60, max_bytes=10**6))


async def put(
    redis: RedisClient, timeout_s: float | None, *, request_id: str = "r", limit: int | None = None, **fields: object
) -> Added | Full | Late:
    texts = {name: str(value) for name, value in fields.items()} | {"prompt": "x"}
    if timeout_s is not None:
        texts["timeout_s"] = str(timeout_s)
    return await enqueue(redis.execute_command, "q", request_id, texts, max_length=limit, dedupe_window_s=60)


async def test_what_cannot_be_kept_is_refused_and_leaves_nothing(redis: RedisClient) -> None:
    await wait_in_line(redis, 20)
    await measure(redis)
    before = set(await redis.keys("*")), await redis.xlen(STREAM)
    assert await put(redis, 9, tenant="t") == Late(20, wait_s=10.0)
    assert (set(await redis.keys("*")), await redis.xlen(STREAM)) == before
    assert isinstance(await put(redis, 10.1, tenant="t"), Added)
    assert isinstance(await put(redis, 1, tenant="t"), Added)  # it is in the queue: nothing is asked again
    assert isinstance(await put(redis, None, request_id="patient", tenant="t"), Added)


async def test_the_queue_s_limit_comes_first(redis: RedisClient) -> None:
    await wait_in_line(redis, 20)
    await measure(redis)
    assert await put(redis, 1, tenant="t", limit=20) == Full(20)
    assert isinstance(await put(redis, 1, tenant="t", limit=21), Late)


async def test_before_a_request_go_those_of_its_priority_and_above(redis: RedisClient) -> None:
    await wait_in_line(redis, 10, priority=-5)
    await wait_in_line(redis, 20, priority=3)
    await wait_in_line(redis, 30, priority=8)
    await measure(redis)
    for priority, expected_s in ((9, 0), (8, 15), (5, 15), (3, 25), (0, 25), (-5, 30), (-6, 30)):
        found = await put(redis, 4, tenant="t", priority=priority, request_id=f"at{priority}")
        assert found == Late(60, wait_s=expected_s) if expected_s else isinstance(found, Added)
        if isinstance(found, Added):
            await redis.xdel(STREAM, found.entry_id)


async def test_a_tenant_waits_for_its_turn_and_not_for_the_crowd(redis: RedisClient) -> None:
    await wait_in_line(redis, 100, tenant="crowd")
    await measure(redis)
    assert await put(redis, 5, tenant="crowd") == Late(100, wait_s=50.0)
    assert await put(redis, 0.4, tenant="few") == Late(100, wait_s=0.5)  # one of the other's, then it
    assert isinstance(await put(redis, 0.6, tenant="few"), Added)
    await wait_in_line(redis, 5, tenant="few")
    await measure(redis)
    found = await put(redis, 4, tenant="few", request_id="seventh")
    assert isinstance(found, Late)
    assert found.wait_s == pytest.approx(6.5, rel=0.01)  # behind its own six, and seven of the other's in turn


async def test_nobody_waits_for_more_than_there_is(redis: RedisClient) -> None:
    await wait_in_line(redis, 20, tenant="t")
    await wait_in_line(redis, 1, tenant="other")
    await measure(redis)
    assert await put(redis, 5, tenant="t") == Late(21, wait_s=10.5)


async def test_weights_count(redis: RedisClient) -> None:
    await wait_in_line(redis, 100, tenant="crowd")
    await measure(redis)
    await redis.hset(keys.weights("q"), mapping={"heavy": "5", "none": "x"})
    assert await put(redis, 0.01, tenant="heavy") == Late(100, wait_s=0.1)
    assert await put(redis, 0.01, tenant="none") == Late(100, wait_s=0.5)


async def test_what_is_due_later_does_not_stand_in_the_way(redis: RedisClient) -> None:
    """A tenant's own requests with long windows wait behind one that is in a hurry."""
    await wait_in_line(redis, 50, timeout_s="9999")
    await measure(redis)
    assert await put(redis, 5, tenant="t") == Added((await newest(redis))[0], again=False)
    found = await put(redis, 20, tenant="other", request_id="b")
    assert isinstance(found, Added)


async def newest(redis: RedisClient) -> tuple[str, Any]:
    entries: Any = await redis.xrevrange(STREAM, count=1)
    return entries[0][0], entries[0][1]


@pytest.mark.parametrize(
    "unknown", ["emptied", "old", "from the future", "no rate", "no worker", "nothing waits", "not a hash", "half"]
)
async def test_where_nothing_is_known_nothing_is_refused(redis: RedisClient, unknown: str) -> None:
    await wait_in_line(redis, 20)
    await measure(redis, WorkerCapacity(slots=4) if unknown == "no rate" else None)
    match unknown:
        case "old":
            await redis.hincrby(keys.load("q"), "at_ms", -5500)
        case "emptied":
            await redis.xtrim(STREAM, maxlen=0, approximate=False)
        case "from the future":
            await redis.hincrby(keys.load("q"), "at_ms", 9000)
        case "no worker":
            await redis.delete(keys.load("q"))
        case "nothing waits":
            await redis.execute_command(*scripts.take("q", worker="w", count=100, **LIMITS))
            await measure(redis)
        case "not a hash":
            await redis.delete(keys.load("q"))
            await redis.set(keys.load("q"), "x")
        case "half":
            await redis.hdel(keys.load("q"), "rate")
    assert isinstance(await put(redis, 0.01, tenant="t"), Added)


async def test_numbers_of_some_seconds_ago_are_good(redis: RedisClient) -> None:
    await wait_in_line(redis, 20)
    await measure(redis)
    await redis.hincrby(keys.load("q"), "at_ms", -3000)
    assert isinstance(await put(redis, 1, tenant="t"), Late)


async def test_an_index_that_somebody_deleted_refuses_nobody_who_might_be_served(redis: RedisClient) -> None:
    await wait_in_line(redis, 20)
    await measure(redis)
    await redis.delete(keys.band("q", 0), keys.lane("q", "t"))
    assert isinstance(await put(redis, 1, tenant="t"), Added)


async def test_a_request_without_a_deadline_costs_nothing_more(redis: RedisClient) -> None:
    await wait_in_line(redis, 20)
    await measure(redis)
    await put(redis, None, request_id="warm-up")
    calls = []
    for timeout_s in (None, 100.0, 0.1):
        await redis.config_resetstat()
        await put(redis, timeout_s, request_id=f"r{timeout_s}", tenant="t")
        stats = await redis.info("commandstats")
        calls.append(
            {name.removeprefix("cmdstat_") for name in stats} - {"config|resetstat", "info", "eval", "evalsha"}
        )
    plain, kept, late = calls
    assert kept - plain == {"hmget", "time"}
    assert late - plain == {"hmget", "time", "zcount", "zcard", "hget"}


async def test_the_client_tells_for_how_long(redis: RedisClient, redis_url: str) -> None:
    await wait_in_line(redis, 20)
    await measure(redis)
    async with AsyncClient(redis_url, queue="q", max_queue_length=100) as client:
        with pytest.raises(QueueFull, match=r"wait for about 10 s now, its timeout_s is 4") as caught:
            await client.submit("x", timeout_s=4, tenant="t")
        error = caught.value
        assert (error.queue, error.length, error.limit, error.wait_s, error.retry_after_s) == ("q", 20, 100, 10, 6)
        await client.submit("x", timeout_s=14, tenant="t")
    async with AsyncClient(redis_url, queue="q", max_queue_length=2) as client:
        with pytest.raises(QueueFull, match="it holds 21 requests, the limit is 2") as caught:
            await client.submit("x", timeout_s=4, tenant="t")
        assert (caught.value.wait_s, caught.value.retry_after_s) == (None, None)
    async with AsyncClient(redis_url, queue="q", max_queue_length=None) as client:  # it waits, whatever comes of it
        await client.submit("x", timeout_s=4, tenant="t")


async def test_many_requests_are_sent_as_fast_as_their_deadlines_can_be_kept(
    redis: RedisClient, redis_url: str
) -> None:
    await wait_in_line(redis, 20)
    await measure(redis)
    async with AsyncClient(redis_url, queue="q") as client:
        results = client.map(["x"], timeout_s=4, tenant="t", timeout=2)
        [result] = [result async for result in results]
    assert isinstance(result.error, TimeoutError | QueueFull)
    assert await redis.xlen(STREAM) == 20


async def test_a_user_from_before_may_not_look_and_is_not_stopped(redis: RedisClient, redis_url: str) -> None:
    await wait_in_line(redis, 20)
    await measure(redis)
    rules = (
        "+@connection", "+command", "(%RW~penstock:{*}:requests %RW~penstock:{*}:seen:* -@all +eval +evalsha)",
        "(%RW~penstock:{*}:requests -@all +xadd +xlen +exists +xgroup|create)",
        "(%RW~penstock:{*}:seen:* -@all +get +set)", "(%R~penstock:{*}:serving -@all +exists)",
    )  # fmt: skip
    await redis.execute_command("ACL", "LOG", "RESET")
    await redis.execute_command("ACL", "SETUSER", "old", "reset", "on", ">secret", *rules)
    async with AsyncClient(redis_url.replace("://", "://old:secret@"), queue="q") as client:
        for _ in range(2):
            await client.submit("x", timeout_s=1, tenant="t")
    assert await redis.xlen(STREAM) == 22
    assert [entry["count"] for entry in await redis.acl_log()] == [1]  # it does not try again
    await redis.execute_command("ACL", "SETUSER", "old", "-evalsha", "-eval", "clearselectors", "allkeys")
    async with AsyncClient(redis_url.replace("://", "://old:secret@"), queue="q") as client:
        with pytest.raises(ServerRefused):
            await client.submit("x", timeout_s=1, tenant="t")
    await redis.execute_command("ACL", "DELUSER", "old")


async def test_the_numbers_are_one_read(raw: RedisClient) -> None:
    assert await query_load(raw.execute_command, "q") is None
    await wait_in_line(raw, 3, priority=-2)
    await wait_in_line(raw, 2)
    await measure(raw)
    found = await query_load(raw.execute_command, "q")
    assert found is not None
    assert abs(found.at_ms / 1000 - time.time()) < 60
    assert (found.num_waiting, found.tokens, found.num_workers, found.slots) == (5, 5 * TOKENS, 1, 4)
    assert (found.tokens_per_s, found.num_running, found.wanted_workers) == (RATE, 0, 1)
    assert [(band.priority, band.num_requests, band.tokens) for band in found.bands] == [(0, 2, 100), (-2, 3, 150)]
    assert 0 <= found.bands[1].oldest_s <= found.oldest_s < 30
    with pytest.raises(ValueError, match="waiting_tokens"):
        QueueLoad.of({b"at_ms": b"1", b"waiting": b"2"})

"""Measures what the server spends on each call that a worker makes in its queue's slot, by number of workers.

It is the server's processor time over many calls in a row on one connection, including reading and writing: the same as
if each call came from another worker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys, scripts
from penstock.protocol.queue.enqueue import enqueue
from penstock.protocol.redis.connection import RedisClient, connect, ensure_group, make_group
from penstock.protocol.redis.pipeline import Command, execute, execute_one
from penstock.protocol.scripts import Bill, WorkerCapacity
from penstock.worker.presence.heartbeat import BEATS_PER_READ

QUEUE = "costs"
LIMITS: dict[str, Any] = {"max_body_bytes": 1 << 20, "max_bytes": 8 << 20}
BODY = {"prompt": "x" * 1000, "max_tokens": "500", "tenant": "t1", "priority": "1", "timeout_s": "600"}
CALLS, LONG_CALLS = 1500, 60
RUNNING = 8  # requests of one worker, per charge
PART = WorkerCapacity(slots=RUNNING, tokens_per_s=100.0, reply_tokens=500.0, token_bytes=4.0)  # of each worker
_MEASURE = scripts.measure(QUEUE, every_ms=0, target_s=60.0, max_bytes=8 << 20)
_SCRAPE: list[Command] = [
    ("HGETALL", keys.load(QUEUE)), ("XLEN", keys.dead(QUEUE)), ("XLEN", keys.malformed(QUEUE)),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one call."""

    us: float
    bytes_in: float  # to the server
    bytes_out: float


Call = Callable[[], Awaitable[Any]]


async def measure(num_workers: int) -> dict[str, Cost]:
    """Returns costs by name of the call."""
    with EmbeddedServer() as server:
        redis = connect(server.socket_url, decode=False)
        await ensure_group(redis, QUEUE)
        await make_group(redis, keys.calls(QUEUE))
        for place in range(num_workers):
            await redis.xgroup_createconsumer(keys.requests(QUEUE), keys.GROUP, f"worker-{place:05d}")
            await redis.zadd(keys.serving(QUEUE), {f"worker-{place:05d}": 4e12})
        found = {name: await _cost(redis, call, CALLS) for name, call in _idle(redis).items()}
        found |= await _of_requests(redis)
        for place in range(num_workers):
            await _give_one(redis, f"worker-{place:05d}")
        for name, call in _over_all(redis, num_workers).items():
            found[name] = await _cost(redis, call, LONG_CALLS)
        for place in range(num_workers):
            await execute_one(redis, scripts.say(QUEUE, worker=f"worker-{place:05d}", part=PART, every_ms=0))
        found["measure"] = await _cost(redis, lambda: execute_one(redis, _MEASURE), CALLS)
        found["scrape"] = await _cost(redis, lambda: execute(redis, _SCRAPE), CALLS)
        await redis.aclose()
    return found


async def _give_one(redis: RedisClient, worker: str) -> None:
    """Gives a worker a pending entry, as all busy workers have."""
    stream = keys.requests(QUEUE)
    commands: list[Command] = [
        ("XADD", stream, "*", "prompt", "x"),
        ("XREADGROUP", "GROUP", keys.GROUP, worker, "COUNT", 1, "STREAMS", stream, ">"),
    ]
    await execute(redis, commands)


def _idle(redis: RedisClient) -> dict[str, Call]:
    """Returns calls that a worker makes even when idle."""

    def script(command: Command) -> Call:
        return lambda: execute_one(redis, command)

    who: dict[str, Any] = {"worker": "worker-00000", **LIMITS}
    beat = scripts.beat(
        QUEUE, worker="worker-00000", instance="0" * 16, ttl_ms=10_000, is_serving=True, must_match=True,
        card={"worker": "worker-00000"}, model_ttl_ms=300_000,
    )  # fmt: skip
    read = ("XREADGROUP", "GROUP", keys.GROUP, "worker-00000", "COUNT", 1, "STREAMS", keys.requests(QUEUE), ">")
    return {
        "take, none": script(scripts.take(QUEUE, count=1, **who)),
        "sweep, none": script(scripts.sweep(QUEUE, count=64, **who)),
        "read, none": script(read),
        "take calls, none": script(scripts.take_calls(QUEUE, count=1, idle_ms=3000, in_hand=(), **who)),
        "beat": script(beat),
    }


def _over_all(redis: RedisClient, num_workers: int) -> dict[str, Call]:
    """Returns calls whose cost grows with the number of workers."""
    workers = [f"worker-{place:05d}" for place in range(num_workers)]
    pages = [workers[start : start + BEATS_PER_READ] for start in range(0, num_workers, BEATS_PER_READ)]
    return {
        "beats of all": lambda: execute(redis, [scripts.lapsed(QUEUE, page) for page in pages]),
        "consumers": lambda: execute_one(redis, ("XINFO", "CONSUMERS", keys.requests(QUEUE), keys.GROUP)),
    }


async def _of_requests(redis: RedisClient) -> dict[str, Cost]:
    """Measures the calls of one request, and a charge of a worker's running ones."""
    entries: list[tuple[str, str]] = []  # with their tenants
    number = 0

    def send(*command: Any) -> Awaitable[Any]:
        return execute_one(redis, command)

    async def add() -> None:
        nonlocal number
        number += 1
        await enqueue(send, QUEUE, f"id{number}", BODY, max_length=10**6, dedupe_window_s=600)

    async def take() -> None:
        worker = f"worker-{len(entries) // RUNNING:05d}"
        answer, *_ = await execute_one(redis, scripts.take(QUEUE, worker=worker, count=1, **LIMITS))
        entries.extend((entry[0].decode(), worker) for entry in answer)

    async def charge() -> None:
        nonlocal number
        number += 1
        bills = [Bill(entry, "t1", number) for entry, _ in entries[:RUNNING]]
        await execute_one(redis, scripts.charge(QUEUE, worker=entries[0][1], bills=bills))

    async def ack() -> None:
        entry, worker = entries.pop(0)
        await execute_one(redis, scripts.ack(QUEUE, worker=worker, bills=[Bill(entry, "t1", 1500)]))

    found = {"enqueue": await _cost(redis, add, CALLS)}
    found["take, one of many"] = await _cost(redis, take, CALLS)  # including laning
    found[f"charge of {RUNNING}"] = await _cost(redis, charge, CALLS)
    found["ack"] = await _cost(redis, ack, CALLS)
    return found


async def _cost(redis: RedisClient, call: Call, count: int) -> Cost:
    before = await _spent(redis)
    for _ in range(count):
        await call()
    after = await _spent(redis)
    us, bytes_in, bytes_out = ((late - early) / count for early, late in zip(before, after, strict=True))
    return Cost(1e6 * us, bytes_in, bytes_out)


async def _spent(redis: RedisClient) -> tuple[float, float, float]:
    cpu: Any = await redis.info("cpu")
    stats: Any = await redis.info("stats")
    seconds = float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])
    return seconds, float(stats["total_net_input_bytes"]), float(stats["total_net_output_bytes"])

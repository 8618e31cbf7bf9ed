"""Memory of the server, its keys and a worker stays flat, however many requests go through."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys
from penstock.protocol.queue.enqueue import Added, enqueue
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.protocol.wire import GenerateRequest
from penstock.tools.chaos.process import FakeWorker
from tests.support.patience import PATIENCE, eventually

TTL_S = 1.0
WAVES = 5  # after each, what has to expire is waited for
CONFIG = {
    "queue": "soak", "name": "w", "health_port": None, "reply_ttl_after_end_s": TTL_S, "block_ms": 200,
    "flush_interval_ms": 5,
}  # fmt: skip

KEPT = {
    keys.requests("soak"), keys.calls("soak"), keys.heartbeat("soak", "w"), keys.serving("soak"), keys.card("soak"),
    keys.queues(), keys.service("soak"), keys.weights("soak"), keys.load("soak"), keys.workers("soak"),
    keys.room("soak"), keys.nudges("soak", "w"), keys.report("soak", "w"), keys.reports("soak"),
    keys.lapses("soak"), keys.alike("soak", "/"), keys.heartbeat("soak", f"{keys.UNOWNED}//"),
}  # fmt: skip

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.timeout(1500 * PATIENCE),
]


@dataclass(frozen=True)
class Sample:
    """State of the queue and its processes after `requests`.

    The server's memory is without its connection buffers, which it shrinks when idle.
    """

    requests: int
    used_memory: int
    num_keys: int
    worker_rss_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.requests:>7} requests: server {self.used_memory / 2**20:6.2f} MiB, {self.num_keys:>6} keys, "
            f"worker {self.worker_rss_bytes / 2**20:7.1f} MiB"
        )


@pytest.mark.parametrize("num_requests", [pytest.param(3000), pytest.param(50_000, marks=pytest.mark.slow)])
async def test_reconnect_stays_flat(tmp_path: Path, num_requests: int) -> None:
    with EmbeddedServer() as server:
        worker = FakeWorker(server.url, tmp_path / "log", {"max_num_seqs": 64}, CONFIG)
        redis = connect(server.url, decode=True)
        try:
            samples = [await wave(redis, worker.pid, number, num_requests // WAVES) for number in range(1, WAVES + 1)]
        finally:
            worker.send(signal.SIGTERM)
            await asyncio.to_thread(worker.wait, 20)
            await redis.aclose()
    sys.stdout.write("\n".join(map(str, samples)) + "\n")
    assert worker.poll() == 0
    first, last = samples[0], samples[-1]
    assert last.num_keys == first.num_keys  # the queue and the worker's heartbeat, and nothing of any request
    assert last.used_memory < first.used_memory * 1.05 + 2**19
    assert last.worker_rss_bytes < first.worker_rss_bytes * 1.02 + 2 * 2**20


async def wave(redis: RedisClient, pid: int, number: int, count: int) -> Sample:
    """Sends `count` more requests, a bounded number at once, and takes a sample when the last of them has expired."""
    for batch in range(0, count, 50):
        ids = [f"s{number}-{batch + at}" for at in range(min(50, count - batch))]
        answers = await asyncio.gather(*(send(redis, request_id) for request_id in ids))
        assert all(isinstance(answer, Added) for answer in answers)
        await eventually(lambda: has_room(redis))
    await eventually(lambda: is_clean(redis))
    return await take_sample(redis, pid, number * count)


async def has_room(redis: RedisClient) -> bool:
    return bool(await redis.xlen(keys.requests("soak")) <= 100)


async def send(redis: RedisClient, request_id: str) -> object:
    fields = GenerateRequest.model_validate({"id": request_id, "prompt": "hello there", "max_tokens": 8}).to_entry()
    return await enqueue(redis.execute_command, "soak", request_id, fields, max_length=1000, dedupe_window_s=1)


async def is_clean(redis: RedisClient) -> bool:
    """Checks whether the queue is empty, with only workers' reports beside its streams.

    The server must also have freed what expired: KEYS leaves it out, DBSIZE counts it until then.
    """
    is_empty = not await redis.xlen(keys.requests("soak")) and await key_names(redis) <= KEPT
    return is_empty and await redis.dbsize() <= len(await redis.keys("*"))


async def key_names(redis: RedisClient) -> set[str]:
    """Returns the names of keys, without the one that stays for a while after each look for dead workers."""
    return set(map(str, await redis.keys("*"))) - {keys.looked("soak")}


async def take_sample(redis: RedisClient, pid: int, requests: int) -> Sample:
    memory = await redis.info("memory")
    rss_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])  # noqa: ASYNC240  the kernel has it at hand
    used_memory = int(memory["used_memory"]) - int(memory["mem_clients_normal"])
    return Sample(requests, used_memory, len(await key_names(redis)), rss_pages * 4096)

"""Tells the other workers that this one lives, and looks after the entries of those that do not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable

import structlog
from redis import exceptions

from penstock.producer import keys
from penstock.producer.connection import RedisClient
from penstock.worker import faults, scripts
from penstock.worker.config import WorkerConfig
from penstock.worker.errors import NameTaken, RedisRefused
from penstock.worker.metrics import Metrics
from penstock.worker.readiness import Readiness

_log = structlog.get_logger(__name__)
_PART = "heartbeat"  # in readiness

RETIRE_COUNT = 100  # entries moved by one script
BEATS_PER_TTL = 3


class Heartbeat:
    """A key with a time to live: while it exists, nobody touches this worker's entries. Its value names the process.

    The same round trip asks whether somebody wants this process to drain (`penstock drain`).
    """

    def __init__(self, redis: RedisClient, config: WorkerConfig, instance: str, readiness: Readiness) -> None:
        self._redis = redis
        self._config = config
        self._instance = instance
        self._readiness = readiness
        self._key = keys.heartbeat(config.queue, config.name)
        self._drain_key = keys.drain(config.queue, config.name)
        self._ttl_ms = round(config.heartbeat_ttl_s * 1000)
        self.told_to_drain = asyncio.Event()

    async def start(self) -> None:
        """Takes the name. A process of the same name that died keeps it until its heartbeat expires, so this may wait.

        Raises:
            NameTaken: its owner lives.
        """
        give_up_s = time.monotonic() + self._config.heartbeat_ttl_s * 1.5
        backoff = faults.Backoff(first_s=0.1, longest_s=0.5)
        while not await self._redis.set(self._key, self._instance, nx=True, px=self._ttl_ms):
            if await self._redis.get(self._key) == self._instance.encode():
                return  # the answer to an earlier try was lost
            if time.monotonic() > give_up_s:
                raise NameTaken(f"another worker of queue {self._config.queue!r} is named {self._config.name!r}")
            await asyncio.sleep(backoff.next_s())

    async def run(self) -> None:
        """Beats until cancelled. While Redis is away it goes on trying: the others notice by the missing key."""
        while True:
            await asyncio.sleep(self._config.heartbeat_ttl_s / BEATS_PER_TTL)
            await survive(self._beat(), _PART, self._readiness)

    async def stop(self) -> None:
        """Says goodbye: what is still pending here may be taken at once."""
        await self._redis.execute_command(
            *scripts.leave(self._config.queue, worker=self._config.name, instance=self._instance)
        )

    async def _beat(self) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.set(self._key, self._instance, px=self._ttl_ms)
        pipeline.get(self._drain_key)
        _, told = await pipeline.execute()
        if told == self._instance.encode():  # a mark for an earlier process of this name means nothing
            self.told_to_drain.set()


class Reclaimer:
    """Frees the entries of consumers whose heartbeat is gone, for whoever has room; every worker does it, unordered.

    Whether their worker had died on them is known from each request's own state, when it is claimed again.
    """

    def __init__(self, redis: RedisClient, config: WorkerConfig, metrics: Metrics, readiness: Readiness) -> None:
        self._redis = redis
        self._config = config
        self._metrics = metrics
        self._readiness = readiness

    async def run(self) -> None:
        """Looks around until cancelled, at jittered intervals so that workers do not all look at once."""
        while True:
            await asyncio.sleep(self._config.reclaim_interval_s * random.uniform(0.75, 1.25))
            await survive(self.scan(), "reclaimer", self._readiness)

    async def scan(self) -> None:
        queue = self._config.queue
        consumers = await self._redis.xinfo_consumers(keys.requests(queue), keys.GROUP)
        names = [consumer["name"].decode() for consumer in consumers]
        for name in names:
            if name not in (self._config.name, keys.UNOWNED):
                await self._retire(name)

    async def _retire(self, consumer: str) -> None:
        queue = self._config.queue
        if await self._redis.exists(keys.heartbeat(queue, consumer)):
            return
        freed = 0
        while True:
            command = scripts.retire(queue, consumer=consumer, count=RETIRE_COUNT)
            moved = int(await self._redis.execute_command(*command))
            freed += max(0, moved)
            if moved < RETIRE_COUNT:
                break
        if freed:
            self._metrics.reclaimed.inc(freed)
            _log.warning("worker_lost", lost=consumer, entries=freed)


async def survive(work: Awaitable[None], part: str, readiness: Readiness) -> None:
    """Runs one round of a periodic task; trouble with Redis makes the worker unready, and the next round tries again.

    Raises:
        RedisRefused: the server will go on refusing.
    """
    try:
        await work
    except exceptions.RedisError as error:
        if faults.is_final(error):
            raise RedisRefused(f"Redis refuses what a worker must do: {error}") from error
        if faults.is_no_group(error):  # the intake makes it
            return
        if not faults.is_passing(error):
            raise
        readiness.object(part, f"no answer from Redis: {error}")
        _log.warning("redis_unreachable", part=part, error=str(error))
    else:
        readiness.clear(part)

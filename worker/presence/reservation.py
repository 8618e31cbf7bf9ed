"""Holds a worker's name from its first look at Redis until it serves."""

from __future__ import annotations

import asyncio

from penstock.protocol import scripts
from penstock.protocol.redis.connection import RedisClient
from penstock.serving.readiness import Readiness
from penstock.worker.config import WorkerConfig
from penstock.worker.errors import NameTaken
from penstock.worker.presence.heartbeat import BEATS_PER_TTL
from penstock.worker.redis import retries
from penstock.worker.redis.guarded import execute_one
from penstock.worker.tasks import pause

_PART = "name"  # name in readiness


class Reservation:
    """Holds a second key, renewed like the heartbeat's, while the model is loaded and warmed up.

    The key is not a heartbeat. If a worker died and was restarted under its name, the others take its requests over as
    soon as its heartbeat has lapsed; they need not wait for the new process. Only a second process of the same name
    looks at this key, and then does not load anything.
    """

    def __init__(self, redis: RedisClient, config: WorkerConfig, readiness: Readiness) -> None:
        self._redis = redis
        self._config = config
        self._readiness = readiness
        self._instance = scripts.new_instance(round(config.heartbeat_ttl_s * 1000))
        self._interval_s = config.heartbeat_ttl_s / BEATS_PER_TTL
        self._rival: scripts.Rival | None = None

    async def take(self, stop: asyncio.Event) -> None:
        """Takes the name, unless `stop` comes first. Waits until the keys of a dead process of that name have lapsed.

        Raises:
            NameTaken: another process of that name lives.
        """
        while (left_s := await self._renew()) and not stop.is_set():
            await pause(stop, min(left_s, self._interval_s))

    async def hold(self) -> None:
        """Renews the key until cancelled.

        Raises:
            NameTaken: another process took the name, while Redis or this process was away for too long.
        """
        while True:
            await asyncio.sleep(self._interval_s)
            await retries.survive(self._renew(), _PART, self._readiness)

    async def release(self) -> None:
        self._readiness.ready(_PART)  # whatever comes of the release: nobody looks at this key from here on
        config = self._config
        await execute_one(self._redis, scripts.release(config.queue, worker=config.name, instance=self._instance))

    async def _renew(self) -> float:
        """Renews; returns 0 if this process has the name, else the seconds until its owner's key lapses."""
        config = self._config
        ttl_ms = round(config.heartbeat_ttl_s * 1000)
        command = scripts.reserve(config.queue, worker=config.name, instance=self._instance, ttl_ms=ttl_ms)
        rival = scripts.parse_reserve(await execute_one(self._redis, command))
        before, self._rival = self._rival, rival
        if self._rival is None:
            return 0.0
        if self._rival.is_seen_to_live(before):
            raise NameTaken(config.name, config.queue)
        return self._rival.left_s

"""Calls of the protocol's scripts, as short as tests like them, for queue `q`."""

from __future__ import annotations

from typing import Any

from penstock.producer import keys
from penstock.producer.redis.connection import RedisClient
from penstock.producer.redis.pipeline import Command
from penstock.worker.protocol.guarded import execute_one

STREAM = keys.requests("q")


async def run(redis: RedisClient, command: Command) -> Any:
    return await execute_one(redis, command)


async def owned(redis: RedisClient, worker: str, n: int = 1) -> list[str]:
    """Adds entries and reads them as `worker`."""
    ids = [(await redis.xadd(STREAM, {"prompt": "x"})).decode() for _ in range(n)]
    await redis.xreadgroup(keys.GROUP, worker, {STREAM: ">"}, count=n)
    return ids


async def owners(redis: RedisClient) -> dict[str, int]:
    """How many entries are pending for each consumer."""
    consumers = await redis.xinfo_consumers(STREAM, keys.GROUP)
    return {consumer["name"].decode(): consumer["pending"] for consumer in consumers}

"""Calls of the protocol's scripts for queue `q`, kept short for tests."""

from __future__ import annotations

from typing import Any

from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.pipeline import Command
from penstock.worker.redis.guarded import execute_one
from tests.support.redis_servers.streams import add_entry

STREAM = keys.requests("q")


async def run(redis: RedisClient, command: Command) -> Any:
    return await execute_one(redis, command)


async def owned(redis: RedisClient, worker: str, n: int = 1) -> list[str]:
    """Adds entries and reads them as `worker`."""
    ids = [await add_entry(redis, STREAM, {"prompt": "x"}) for _ in range(n)]
    await redis.xreadgroup(keys.GROUP, worker, {STREAM: ">"}, count=n)
    return ids


async def owners(redis: RedisClient) -> dict[str, int]:
    """Returns the number of pending entries of each consumer."""
    consumers = await redis.xinfo_consumers(STREAM, keys.GROUP)
    return {consumer["name"].decode(): consumer["pending"] for consumer in consumers}


async def give_up_as_before(redis: RedisClient, entry_ids: list[str], *, consumer: str = keys.UNOWNED) -> None:
    """Gives entries up as workers do whose lanes keep no place for returned entries: the entries belong to nobody."""
    await redis.xclaim(STREAM, keys.GROUP, consumer, 0, [*entry_ids], justid=True)


async def put_back(redis: RedisClient, worker: str, entry_ids: list[str], **more: Any) -> int:
    """Puts entries back; returns how many wait again."""
    _, put = await run(redis, scripts.put_back("q", worker=worker, entry_ids=entry_ids, **more))
    return int(put)

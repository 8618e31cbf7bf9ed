"""What API keys are charged, and what workers have published."""

from __future__ import annotations

from typing import Any

from penstock.gateway.store import names
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import eventually
from tests.support.redis_servers.streams import read_stream


async def replies(redis: RedisClient, queue: str) -> frozenset[str]:
    """Returns the keys of all replies."""
    return frozenset(map(str, await redis.keys(keys.reply(queue, "*"))))


async def published(redis: RedisClient, queue: str, but: frozenset[str] = frozenset()) -> int | None:
    """Returns the tokens of all replies `but` some, prompts included; None while one has not ended."""
    total = 0
    for name in await replies(redis, queue) - but:
        _, last = (await read_stream(redis, name))[-1]
        if last["type"] != "end":
            return None
        total += int(last["prompt_tokens"]) + int(last["completion_tokens"])
    return total


async def all_charged(redis: RedisClient, key_id: str) -> int:
    """Returns the tokens that a key was charged, once it has no tab left. Another gateway looks at once, not after 15
    s.
    """
    open_tabs: Any = await redis.hkeys(names.key_open(key_id))
    if open_tabs:
        await redis.zadd(names.unsettled(), {f"{key_id} {tab}": 0 for tab in open_tabs})

    async def is_settled() -> bool:
        return not await redis.exists(names.key_open(key_id))

    await eventually(is_settled)
    counts: Any = await redis.hgetall(names.key_tokens(key_id))
    return sum(map(int, counts.values()))

"""Dead letters of queue `q`, added as a worker would."""

from __future__ import annotations

from penstock.protocol.operations import dead_letters
from penstock.protocol.operations.dead_letters import Kind
from penstock.protocol.redis.connection import RedisClient


async def add_letter(
    redis: RedisClient, request_id: str, code: str = "too_many_crashes", *, kind: Kind = "request", **fields: str
) -> str:
    letter = {"id": request_id, "entry": "1000-0", "code": code, "message": "why", "worker": "w", "crashes": "3"}
    letter |= {f"field:{name}": value for name, value in fields.items()}
    return str(await redis.xadd(dead_letters.stream_of("q", kind), letter))  # type: ignore[arg-type]

"""Tells a reply that expired from one that has not begun."""

from __future__ import annotations

from penstock.protocol.redis.connection import RedisClient

ENDED = ("done", "dead")
"""Values of `status` in a request's state once its reply has ended."""


async def find_gone(redis: RedisClient, replies: list[tuple[str, str, bool]]) -> list[bool]:
    """Returns which replies of one hash slot are gone, given (key, key of the state, whether it had begun).

    A reply that has not begun is not gone. Where this client may not look, none is reported as gone.
    """
    async with redis.pipeline(transaction=False) as pipe:
        for reply_key, state_key, _ in replies:
            pipe.hget(state_key, "status")
            pipe.exists(reply_key)
        answers = await pipe.execute(raise_on_error=False)
    return [
        exists == 0 and ((isinstance(status, bytes) and status.decode(errors="replace") in ENDED) or was_there)
        for (_, _, was_there), status, exists in zip(replies, answers[::2], answers[1::2], strict=True)
    ]

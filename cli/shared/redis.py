"""Connects subcommands to Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.protocol.redis.address import parse_url
from penstock.protocol.redis.connection import RedisClient, connect, redis_errors


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RedisClient]:
    """Yields a client that does not decode, and closes it after the block.

    Raises:
        ConnectionLost: the server can't be reached or does not answer.
        ServerRefused: the server answered with an error.
    """
    address = parse_url(url)
    client = connect(address, decode=False, name="penstock-cli")
    try:
        with redis_errors(address):
            yield client
    finally:
        await client.aclose()


def visible(text: str) -> str:
    """Escapes foreign text for a terminal: nothing in it moves the cursor or changes colours."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)

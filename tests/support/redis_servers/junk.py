"""What somebody may write by mistake into keys of each kind of the tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from penstock.gateway.store import key_table as gateway_table
from penstock.protocol import key_table
from penstock.protocol.redis.connection import RedisClient

Type: TypeAlias = Literal["string", "list", "hash", "set", "zset", "stream"]

QUEUE_KINDS = key_table.TABLE
GATEWAY_KINDS = gateway_table.TABLE

Write: TypeAlias = Callable[[Any, str], Any]

LARGE = "x" * (1 << 20)
TEXTS: dict[str, str | bytes] = {
    "words": "something else",
    "empty": "",
    "huge": LARGE,
    "truncated": '{"object": "batch", "sta',
    "deep": "[" * 100_000,
    "no text": b"\xff\xfe\x80",
    "a number past all": "9" * 400,
    "no number": "nan",
}


def _string(text: str | bytes) -> Write:
    return lambda redis, key: redis.set(key, text)


def _hash(text: str | bytes) -> Write:
    return lambda redis, key: redis.hset(key, mapping={"junk": text, "worker": text, "at_ms": text, "0": text})


def _zset(text: str | bytes, score: float | str) -> Write:
    return lambda redis, key: redis.execute_command("ZADD", key, score, text, 1, b"1" + _bytes(text))


def _stream(text: str | bytes, entry_id: str) -> Write:
    return lambda redis, key: redis.execute_command("XADD", key, entry_id, "junk", text, "id", text)


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


WRONG_TYPES: Mapping[Type, Write] = {
    "string": _string("something else"),
    "list": lambda redis, key: redis.rpush(key, "something else"),
    "hash": lambda redis, key: redis.hset(key, "something", "else"),
    "set": lambda redis, key: redis.sadd(key, "something else"),
    "zset": lambda redis, key: redis.zadd(key, {"something else": 7}),
    "stream": lambda redis, key: redis.xadd(key, {"something": "else"}),
}
"""Writers of wrong types, by the type that they make of a key."""

LAST_ID = f"{2**64 - 1}-{2**64 - 1}"
WRONG_VALUES: Mapping[Type, Mapping[str, Write]] = {
    "string": {name: _string(text) for name, text in TEXTS.items()},
    "hash": {name: _hash(text) for name, text in TEXTS.items()},
    "zset": {
        **{name: _zset(text, 1) for name, text in TEXTS.items()},
        **{f"{score}": _zset("junk", score) for score in ("inf", "-inf", "1e300", "-1e300", "0.5")},
    },
    "stream": {
        **{name: _stream(text, "*") for name, text in TEXTS.items()},
        "the last id": _stream("junk", LAST_ID),
    },
    "set": {name: lambda redis, key, text=text: redis.sadd(key, text) for name, text in TEXTS.items()},  # type: ignore[misc]
}
"""Writers of wrong values, by the type of the key, which stays as it was."""


async def harm(redis: RedisClient, key: str, write: Write) -> bytes:
    """Replaces what a key holds with junk; returns what the server then holds."""
    async with redis.pipeline(transaction=True) as pipe:  # nobody writes in between
        pipe.delete(key)
        write(pipe, key)
        pipe.dump(key)
        return bytes((await pipe.execute())[-1])


async def dump(redis: RedisClient, key: str) -> bytes:
    """Returns the bytes of a key; empty if there is none."""
    return await redis.execute_command("DUMP", key) or b""


async def is_kept(redis: RedisClient, key: str, junk: bytes) -> bool:
    """Checks whether the junk is in its place, or was set aside."""
    if await dump(redis, key) == junk:  # first: it may be set aside while this looks
        return True
    places = [each.decode() async for each in redis.scan_iter(match="*}:junk:*", count=1000)]
    return junk in [await dump(redis, place) for place in places]

"""Every kind of key that our modules name, and what somebody may write there by mistake."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, TypeAlias

from penstock.gateway.store import names
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient

Type: TypeAlias = Literal["string", "list", "hash", "set", "zset", "stream"]

# A new kind of key has no row, and the tests fail until it has one.
OF_QUEUES: Mapping[str, Type] = {
    "requests": "stream", "lane": "zset", "band": "zset", "bands": "zset", "service": "zset", "weights": "hash",
    "charged": "hash", "due": "zset", "backlog": "hash", "load": "hash", "workers": "hash", "passed": "zset",
    "homes": "hash", "room": "zset", "nudges": "stream", "cancelled": "set", "seen": "string", "dead": "stream",
    "malformed": "stream", "letter_sizes": "stream", "letter_bytes": "string", "heartbeat": "string",
    "looked": "string", "serving": "zset", "card": "hash", "digests": "hash", "queues": "zset", "calls": "stream",
    "answers": "stream", "report": "string", "reports": "zset", "starting": "string", "drain": "string",
    "reply": "stream", "state": "hash", "cancel": "string", "wake": "stream", "named": "hash", "asked": "zset",
    "aside": "zset",
}  # fmt: skip
OF_GATEWAYS: Mapping[str, Type] = {
    "api_keys": "hash", "revocations": "hash", "revocation_notices": "stream", "key_requests": "hash",
    "key_running": "zset", "key_open": "hash", "key_tokens": "hash", "key_charges": "zset", "unsettled": "zset",
    "record": "string",
    "owned": "zset", "body": "hash", "file_users": "zset", "batch_leases": "zset", "batch_holders": "hash",
    "batch_progress": "hash", "ledger_sizes": "hash", "ledger_expiries": "zset", "fingerprint": "string",
    "readers": "zset", "swept": "string", "probe": "string",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """A function that names keys, and the type of what they hold."""

    name: str
    make: Callable[..., str]
    type: Type

    def key(self, **of: Any) -> str:
        """Returns the key of this kind, with arguments by parameter name."""
        return self.make(**{name: of[name] for name in inspect.signature(self.make).parameters})


def kinds_of(module: ModuleType, table: Mapping[str, Type]) -> list[Kind]:
    """Returns all kinds of keys that a module names, each with its type."""
    made = {
        name: make
        for name, make in vars(module).items()
        if inspect.isfunction(make) and make.__module__ == module.__name__ and not name.startswith("_")
    }
    assert made.keys() == table.keys(), "say in tests/junk.py what each kind of key holds"
    return [Kind(name, make, table[name]) for name, make in made.items()]


QUEUE_KINDS = kinds_of(keys, OF_QUEUES)
GATEWAY_KINDS = kinds_of(names, OF_GATEWAYS)

Write: TypeAlias = Callable[[Any, str], Any]

LARGE = "x" * (1 << 20)
TEXTS = {
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
    places = [key, *[each.decode() async for each in redis.scan_iter(match="*}:junk:*", count=1000)]]
    return junk in [await dump(redis, place) for place in places]

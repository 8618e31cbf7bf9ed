"""Checks what a worker's Redis user must be allowed to do, without doing any of it."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.protocol import keys
from penstock.protocol.consumers import set_aside_for
from penstock.protocol.key_kinds import Grant, KeyKind
from penstock.protocol.key_table import BLOCKS, SETS_ASIDE, TABLE
from penstock.protocol.lua import call, load
from penstock.protocol.redis.connection import RedisClient
from penstock.serving import hints
from penstock.worker.errors import RedisRefused
from penstock.worker.redis.guarded import GUARD

_DENIED = load("penstock.worker.redis", "denied")
NAMED_AT_MOST = 4
_PROBE = "penstock-probe"  # a request and a worker that need not exist

_FORMS = {
    "del": "DEL {}",
    "eval": "EVAL s 1 {}",
    "evalsha": "EVALSHA s 1 {}",
    "exists": "EXISTS {}",
    "get": "GET {}",
    "hdel": "HDEL {} f",
    "hget": "HGET {} f",
    "hgetall": "HGETALL {}",
    "hincrby": "HINCRBY {} f 1",
    "hlen": "HLEN {}",
    "hmget": "HMGET {} f",
    "hrandfield": "HRANDFIELD {}",
    "hset": "HSET {} f v",
    "hsetnx": "HSETNX {} f v",
    "hvals": "HVALS {}",
    "mget": "MGET {}",
    "pexpire": "PEXPIRE {} 1",
    "pexpireat": "PEXPIREAT {} 1",
    "pexpiretime": "PEXPIRETIME {}",
    "pttl": "PTTL {}",
    "set": "SET {} v",
    "spop": "SPOP {}",
    "strlen": "STRLEN {}",
    "time": "TIME",
    "xack": "XACK {} g 0-1",
    "xadd": "XADD {} * f v",
    "xclaim": "XCLAIM {} g c 0 0-1",
    "xdel": "XDEL {} 0-1",
    "xgroup|create": "XGROUP CREATE {} g 0",
    "xgroup|delconsumer": "XGROUP DELCONSUMER {} g c",
    "xinfo|consumers": "XINFO CONSUMERS {}",
    "xinfo|groups": "XINFO GROUPS {}",
    "xlen": "XLEN {}",
    "xpending": "XPENDING {} g",
    "xrange": "XRANGE {} - +",
    "xreadgroup": "XREADGROUP GROUP g c STREAMS {} >",
    "xrevrange": "XREVRANGE {} + -",
    "xtrim": "XTRIM {} MAXLEN 1",
    "zadd": "ZADD {} 1 m",
    "zcard": "ZCARD {}",
    "zincrby": "ZINCRBY {} 1 m",
    "zmscore": "ZMSCORE {} m",
    "zrange": "ZRANGE {} 0 1",
    "zrangebyscore": "ZRANGEBYSCORE {} 0 1",
    "zrem": "ZREM {} m",
    "zremrangebyrank": "ZREMRANGEBYRANK {} 0 1",
    "zremrangebyscore": "ZREMRANGEBYSCORE {} 0 1",
    "zscore": "ZSCORE {} m",
}
"""Each command that the table of keys grants to workers, as it is asked about."""

OPTIONAL = {
    "CLIENT SETNAME": "CLIENT LIST shows no names",
    "INFO": "a gateway bounds what it keeps as if Redis had 1 GiB, and doctor sees no version and no memory",
    "CONFIG GET": "doctor sees no settings of the server",
}
"""Commands that our programs can do without, and what is missing then. docs/operations.md has them too."""


async def optional_denied(redis: RedisClient) -> list[str]:
    """Returns `OPTIONAL` commands that this user may not run. Raises like `denied`."""
    missing = await _denied(redis, [("", f"{name} x" if " " in name else name) for name in OPTIONAL])
    return [name.removesuffix(" x") for name in missing]


async def check_permissions(redis: RedisClient, queue: str) -> None:
    """Checks that everything that a worker does in `queue` is allowed.

    Raises:
        RedisRefused: it is not; the message names the first missing commands.
        RedisError: see `denied`.
    """
    missing = await denied(redis, queue)
    if missing:
        named = ", ".join(missing[:NAMED_AT_MOST])
        more = f" and {len(missing) - NAMED_AT_MOST} more" if len(missing) > NAMED_AT_MOST else ""
        raise RedisRefused(f"this Redis user may not do what a worker must: {named}{more}; {hints.ROLES}")


async def denied(redis: RedisClient, queue: str) -> list[str]:
    """Returns what a worker does in `queue` but this connection's user may not, such as `XADD on
    penstock:{q}:requests`.

    Raises:
        RedisError: the user may not even run scripts, or the server can't be asked.
    """
    return await _denied(redis, [("", "TIME"), *_needs(queue)])


def _needs(queue: str) -> Iterator[tuple[str, str]]:
    """Yields what the table grants to workers, as pairs of a key and a command on it."""
    for kind in TABLE:
        for key in _probes(kind, queue):
            for grant in kind.needs("worker"):
                yield from ((key, form) for form in _forms(grant, key, queue))


def _probes(kind: KeyKind, queue: str) -> Iterator[str]:
    """Yields keys of a kind, of a request and a worker that need not exist."""
    values = {"queue": queue, "priority": "0"}
    yield from kind.named(lambda parameter: values.get(parameter, _PROBE))
    if kind.make is keys.heartbeat:
        yield keys.heartbeat(queue, set_aside_for(_PROBE))


def _forms(grant: Grant, key: str, queue: str) -> Iterator[str]:
    """Yields the commands that a grant on a key has to allow."""
    if grant is BLOCKS:  # one selector must allow both keys
        if key != keys.requests(queue):
            yield f"XREADGROUP GROUP g c STREAMS {keys.requests(queue)} {{}} > >"
    elif grant is SETS_ASIDE:
        yield f"RENAMENX {{}} {GUARD.place_for(key)}"
    else:
        yield from (_FORMS[command] for command in grant.commands.split())


async def _denied(redis: RedisClient, needs: list[tuple[str, str]]) -> list[str]:
    arguments: list[str | int] = []
    for key, command in needs:
        words = [word.replace("{}", key) for word in command.split()]
        arguments += (len(words), *words)
    places = await redis.execute_command(*call(_DENIED, (), arguments))  # no keys to name, as nothing is touched
    return [_described(*needs[place]) for place in places]


def _described(key: str, command: str) -> str:
    name = command.partition(" {}")[0].partition(" GROUP ")[0].partition(" s ")[0]  # without its arguments
    return f"{name} on {key}" if key else name

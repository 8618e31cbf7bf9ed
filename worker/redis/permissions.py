"""Checks what a worker's Redis user must be allowed to do, without doing any of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.protocol import keys
from penstock.protocol.consumers import set_aside_for
from penstock.protocol.lua import call, load
from penstock.protocol.redis.connection import RedisClient
from penstock.serving import hints
from penstock.worker.errors import RedisRefused
from penstock.worker.redis.guarded import GUARD

_DENIED = load("penstock.worker.redis", "denied")
NAMED_AT_MOST = 4
_PROBE = "penstock-probe"  # a request and a worker that need not exist

_SCRIPTS = ("EVAL s 1 {}", "EVALSHA s 1 {}")  # on each key
_ON_REQUESTS = (
    "XGROUP CREATE {} g 0", "XGROUP DELCONSUMER {} g c", "XREADGROUP GROUP g c STREAMS {} >", "XRANGE {} - +",
    "XLEN {}", "XACK {} g 0-1", "XDEL {} 0-1", "XCLAIM {} g c 0 0-1", "XPENDING {} g", "XINFO GROUPS {}",
    "XINFO CONSUMERS {}", "EXISTS {}",
)  # fmt: skip
_ON_REPLY = ("XADD {} * f v", "XRANGE {} - +", "XREVRANGE {} + -", "EXISTS {}", "PEXPIRE {} 1")
_ON_STATE = (
    "HGET {} f", "HMGET {} f", "HSET {} f v", "HSETNX {} f v", "HINCRBY {} f 1", "EXISTS {}", "PEXPIRE {} 1",
)  # fmt: skip
_ON_CANCEL = ("EXISTS {}", "DEL {}")
_ON_PRESENCE = ("GET {}", "SET {} v", "EXISTS {}", "DEL {}", "PEXPIRE {} 1", "PEXPIRETIME {}")
_ON_QUEUES = (
    "ZADD {} 1 m", "ZREM {} m", "ZREMRANGEBYSCORE {} 0 1", "ZRANGE {} 0 1", "PEXPIREAT {} 1", "DEL {}",
)  # fmt: skip
_ON_SERVING = (*_ON_QUEUES, "ZCARD {}", "ZSCORE {} m", "ZRANGEBYSCORE {} 0 1", "EXISTS {}")
_ON_CARD = ("HMGET {} f", "HSET {} f v", "PTTL {}", "PEXPIRE {} 1", "PEXPIRETIME {}", "DEL {}")
_ON_DIGESTS = ("HSET {} f v", "HDEL {} f", "PTTL {}", "PEXPIRE {} 1", "DEL {}")
_ON_CALLS = (
    "XGROUP CREATE {} g 0", "XGROUP DELCONSUMER {} g c", "XREADGROUP GROUP g c STREAMS {} >", "XACK {} g 0-1",
    "XDEL {} 0-1", "XCLAIM {} g c 0 0-1", "XPENDING {} g", "XINFO CONSUMERS {}", "PEXPIRE {} 1",
)  # fmt: skip
_ON_ANSWERS = ("XADD {} * f v", "PEXPIRE {} 1")
_ON_LANES = (
    "ZADD {} 1 m", "ZREM {} m", "ZRANGE {} 0 1", "ZSCORE {} m", "ZINCRBY {} 1 m", "ZRANGEBYSCORE {} 0 1",
    "ZREMRANGEBYSCORE {} 0 1", "EXISTS {}", "HGET {} f", "HMGET {} f", "HSET {} f v", "HSETNX {} f v", "HDEL {} f",
)  # fmt: skip
_ON_NUMBERS = (
    "HGETALL {}", "HMGET {} f", "HSET {} f v", "HDEL {} f", "DEL {}", "PEXPIRE {} 1",
)  # fmt: skip
_ON_SERVICE = (*_ON_LANES, "ZCARD {}", "ZREMRANGEBYRANK {} 0 1")
_ON_NAMED = ("HSET {} f v", "HMGET {} f", "HDEL {} f", "HLEN {}", "HRANDFIELD {}")
_ON_ASKED = (
    "ZADD {} 1 m", "ZMSCORE {} m", "ZINCRBY {} 1 m", "ZREM {} m", "ZREMRANGEBYSCORE {} 0 1", "ZREMRANGEBYRANK {} 0 1",
    "EXISTS {}", "PEXPIRE {} 1",
)  # fmt: skip
_ON_ASIDE = ("ZADD {} 1 m", "ZREM {} m", "ZRANGE {} 0 1", "DEL {}")
_ON_PASSED = ("ZADD {} 1 m", "ZREM {} m", "ZMSCORE {} m")
_ON_HOMES = ("HGET {} f", "HMGET {} f", "HGETALL {}", "HVALS {}", "HSET {} f v", "DEL {}")
_ON_ROOM = ("ZADD {} 1 m", "ZREM {} m", "ZSCORE {} m", "ZRANGE {} 0 1")
_ON_NUDGES = (
    "XGROUP CREATE {} g 0", "XREADGROUP GROUP g c STREAMS {} >", "XACK {} g 0-1", "XADD {} * f v", "PEXPIRE {} 1",
    "DEL {}",
)  # fmt: skip
_ON_REPORT = ("SET {} v", "DEL {}")
_ON_LETTERS = ("XADD {} * f v", "XTRIM {} MAXLEN 1", "XLEN {}", "PEXPIRE {} 1")
_ON_LETTER_COUNTS = (
    "XADD {} * f v", "XRANGE {} - +", "XDEL {} 0-1", "XLEN {}", "GET {}", "SET {} v", "DEL {}", "PEXPIRE {} 1",
)  # fmt: skip


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
    needs = [
        (key, command)
        for key, commands in (*_of_queue(queue), *_of_request(queue))
        for command in (*commands, *(_SCRIPTS if key else ()), *_set_aside(key))
    ]
    return await _denied(redis, needs)


def _of_queue(queue: str) -> Iterator[tuple[str, Iterable[str]]]:
    yield "", ("TIME",)
    yield keys.requests(queue), _ON_REQUESTS
    for key in (
        keys.heartbeat(queue, _PROBE),
        keys.heartbeat(queue, set_aside_for(_PROBE)),
        keys.drain(queue, _PROBE),
        keys.starting(queue, _PROBE),
    ):
        yield key, _ON_PRESENCE
    for key in (keys.lane(queue), keys.lane(queue, _PROBE), keys.band(queue, 0), keys.bands(queue)):
        yield key, _ON_LANES
    for key in (keys.weights(queue), keys.charged(queue)):
        yield key, _ON_LANES
    yield keys.due(queue), (*_ON_LANES, "ZCARD {}")
    yield keys.service(queue), _ON_SERVICE
    yield keys.named(queue), _ON_NAMED
    yield keys.asked(queue), _ON_ASKED
    yield keys.aside(queue, _PROBE), _ON_ASIDE
    yield keys.backlog(queue), (*_ON_NUMBERS, "HINCRBY {} f 1")
    yield keys.load(queue), _ON_NUMBERS
    yield keys.workers(queue), (*_ON_NUMBERS, "HLEN {}", "HRANDFIELD {}")
    yield keys.passed(queue), _ON_PASSED
    yield keys.homes(queue), _ON_HOMES
    yield keys.room(queue), _ON_ROOM
    both = f"XREADGROUP GROUP g c STREAMS {keys.requests(queue)} {{}} > >"  # one selector must allow all keys
    yield keys.nudges(queue, _PROBE), (*_ON_NUDGES, both)
    yield keys.heartbeat(queue, _PROBE), ("MGET {}",)
    yield keys.looked(queue), ("SET {} v", "STRLEN {}", "PTTL {}")
    yield keys.report(queue, _PROBE), _ON_REPORT
    yield keys.reports(queue), _ON_QUEUES
    yield keys.cancelled(queue), ("SPOP {}", "EXISTS {}")
    yield keys.seen(queue, _PROBE), ("GET {}", "SET {} v")
    yield keys.serving(queue), _ON_SERVING
    yield keys.queues(), _ON_QUEUES
    yield keys.card(queue), _ON_CARD
    yield keys.digests(queue), _ON_DIGESTS
    yield keys.calls(queue), _ON_CALLS
    yield keys.answers(queue, _PROBE), _ON_ANSWERS
    for letters in (keys.dead(queue), keys.malformed(queue)):
        yield letters, _ON_LETTERS
        for key in (keys.letter_sizes(letters), keys.letter_bytes(letters)):
            yield key, _ON_LETTER_COUNTS


def _set_aside(key: str) -> Iterator[str]:
    place = GUARD.place_for(key)
    if place is not None and ":report:" not in key:  # reports are overwritten, and only operators read them
        yield f"RENAMENX {{}} {place}"


def _of_request(queue: str) -> Iterator[tuple[str, Iterable[str]]]:
    yield keys.reply(queue, _PROBE), _ON_REPLY
    yield keys.state(queue, _PROBE), _ON_STATE
    yield keys.cancel(queue, _PROBE), _ON_CANCEL


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

"""Every kind of key of queues and requests: what `keys` names, in the same order, and what each role may do with it.

`deploy/redis/users.acl` is written from this table and from `gateway.store.key_table`. Workers check at their start
what it grants them. docs/wire.md lists those that clients may use.
"""

from __future__ import annotations

from typing import TypeAlias

from penstock.protocol import keys
from penstock.protocol.key_kinds import Area, Grant, KeyKind, Role, Size

Roles: TypeAlias = tuple[Role, ...]

_CLIENTS: Roles = ("producer", "gateway", "reader")
_SENDERS: Roles = ("producer", "gateway")
_WORKER: Roles = ("worker",)
_OPERATOR: Roles = ("operator",)

_CONNECTION = (
    "auth hello ping select quit reset command asking client|setname cluster|slots cluster|shards cluster|nodes"
)
KEYLESS: dict[Role, str] = {
    "producer": f"{_CONNECTION} time",
    "gateway": f"{_CONNECTION} time info",
    "reader": _CONNECTION,
    "worker": f"{_CONNECTION} time",
    "autoscaler": f"{_CONNECTION} info",
    "operator": f"{_CONNECTION} info time",
}
"""Commands without keys by role: those that a connection needs, and a few more."""

_SCRIPTS = "eval evalsha"
_READS = Grant(_CLIENTS, "R", "xread xrange xrevrange exists hget hmget", is_root=True)
_IS_THERE = Grant(_CLIENTS, "R", "exists")
_ENQUEUES = Grant(_SENDERS, "RW", _SCRIPTS, "the script that enqueues")
_CALLS = Grant(_SENDERS, "RW", _SCRIPTS, "the script that calls")
_RUNS = Grant(_WORKER, "RW", _SCRIPTS, "the scripts of workers")
BLOCKS = Grant(_WORKER, "RW", "xreadgroup", "one blocking read")
"""A worker waits for requests and nudges in one command."""
SETS_ASIDE = Grant(_WORKER, "RW", "renamenx", "what was set aside")
"""Junk gets another name (`queue.junk`). A worker renames no request, and no reply."""
_SHOWS = Grant(_OPERATOR, "R", "eval_ro evalsha_ro", "the scripts that show a queue")
_REPLAYS = Grant(_OPERATOR, "RW", _SCRIPTS, "the scripts on letters")
_CANCELS = Grant((*_SENDERS, "operator"), "W", "set")
_NOTES_CANCELS = Grant((*_SENDERS, "operator"), "W", "sadd expire")
_LISTS = Grant(_OPERATOR, "R", "zrange")
_DESCRIBES = Grant(_OPERATOR, "R", "hgetall")
_HOLDS_NAMES = Grant(_WORKER, "RW", "get set exists del pexpire pexpiretime")
_ENROLLING = "zadd zrem zremrangebyscore zrange pexpireat del"
_ENROLS = Grant(_WORKER, "RW", _ENROLLING, "who serves")
_READS_LETTERS = Grant(_OPERATOR, "RW", "xlen xrange xrevrange xdel decrby")
_BURIES = Grant(_WORKER, "W", "xadd xtrim xlen pexpire")
_LETTERS = (_BURIES, SETS_ASIDE, _RUNS, _READS_LETTERS, _REPLAYS, _SHOWS)

LANES = Area(
    ("penstock:{*}:lanes:*",),
    (_ENQUEUES, SETS_ASIDE, _RUNS, Grant(_OPERATOR, "R", "zrange zcard zcount hgetall"), _SHOWS),
)
WORKERS = Area(
    ("penstock:{*}:worker:*",),
    (_IS_THERE, _HOLDS_NAMES, SETS_ASIDE, _RUNS, Grant(_OPERATOR, "R", "get exists pttl"), _SHOWS),
)
LETTER_COUNTS = Area(
    ("penstock:{*}:dead:*", "penstock:{*}:malformed:*"),
    (
        Grant(_WORKER, "RW", "xadd xrange xdel xlen get set del pexpire"),
        SETS_ASIDE,
        _RUNS,
        _READS_LETTERS,
        _REPLAYS,
    ),
)
JUNK = Area(("penstock:{*}:junk:*", "{penstock:queues}:junk:*"), (SETS_ASIDE,))
"""Where junk is set aside. It stays until an operator deletes it."""

AREAS = (LANES, WORKERS, LETTER_COUNTS, JUNK)


def _lanes(commands: str) -> tuple[Grant, ...]:
    return (Grant(_WORKER, "RW", commands, "lanes"),)


_ORDER = _lanes("zadd zrem zrange zscore zincrby zrangebyscore zremrangebyscore exists")
_PLACES = _lanes("hget hmget hset hsetnx hdel exists")

_LANE_KINDS = (
    KeyKind(
        keys.lane, "zset", "worker", Size(tenant=80, request=75), area=LANES, wide=_ORDER,
        grants=(Grant(_SENDERS, "R", "zcount"),),
    ),
    KeyKind(
        keys.band, "zset", "worker", Size(queue=80, tenant=20), area=LANES, wide=_ORDER,
        grants=(Grant(_SENDERS, "R", "zcard"),),
    ),
    KeyKind(keys.bands, "zset", "worker", Size(queue=80), area=LANES, wide=_ORDER),
    KeyKind(
        keys.service, "zset", "worker", Size(queue=80, tenant=15), area=LANES,
        wide=(*_ORDER, *_lanes("zcard zremrangebyrank")),
    ),
    KeyKind(
        keys.weights, "hash", "operator", Size(queue=80, tenant=10), area=LANES, wide=_PLACES,
        grants=(Grant(_SENDERS, "R", "hget"), Grant(_OPERATOR, "W", "hset hdel")),
    ),
    KeyKind(keys.charged, "hash", "worker", Size(queue=80, running=65), area=LANES, wide=_PLACES),
    KeyKind(keys.due, "zset", "worker", Size(queue=80, request=75), area=LANES, wide=(*_ORDER, *_lanes("zcard"))),
    KeyKind(
        keys.backlog, "hash", "worker", Size(queue=150), area=LANES,
        wide=_lanes("hgetall hmget hset hdel del pexpire hincrby"),
    ),
    KeyKind(
        keys.load, "hash", "worker", Size(queue=290), "an hour after the last worker", area=LANES,
        wide=_lanes("hgetall hmget hset hdel del pexpire"),
        grants=(Grant(_SENDERS, "R", "hgetall hmget"), Grant(("autoscaler",), "R", "hgetall")),
    ),
    KeyKind(
        keys.workers, "hash", "worker", Size(queue=80, worker=50), "an hour after the last worker", area=LANES,
        wide=_lanes("hgetall hmget hset hdel del pexpire hlen hrandfield"),
    ),
    KeyKind(keys.passed, "zset", "worker", Size(held=75), area=LANES, wide=_lanes("zadd zrem zmscore")),
    KeyKind(
        keys.homes, "hash", "worker", Size(queue=60_000), area=LANES, wide=_lanes("hget hmget hgetall hvals hset del"),
    ),
    KeyKind(keys.room, "zset", "worker", Size(queue=70, worker=25), area=LANES, wide=_lanes("zadd zrem zscore zrange")),
    KeyKind(
        keys.nudges, "stream", "worker", Size(worker=4_600), "with the worker's heartbeat", area=LANES,
        wide=_lanes("xgroup|create xreadgroup xack xadd pexpire del"),
        grants=(BLOCKS,),
    ),
    KeyKind(keys.named, "hash", "worker", Size(request=70), area=LANES, wide=_lanes("hset hmget hdel hlen hrandfield")),
    KeyKind(
        keys.asked, "zset", "worker", Size(cancelled=90), "a day after the last cancel", area=LANES,
        wide=_lanes("zadd zmscore zincrby zrem zremrangebyscore zremrangebyrank exists pexpire"),
    ),
    KeyKind(keys.aside, "zset", "worker", Size(held=75), area=LANES, wide=_lanes("zadd zrem zrange del")),
    KeyKind(keys.orphaned, "zset", "worker", Size(held=75), area=LANES, wide=_ORDER),
    KeyKind(
        keys.alike, "zset", "worker", Size(queue=110, worker=30), "with the last heartbeat", area=LANES,
        wide=_lanes("zadd zrem zrangebyscore zremrangebyscore pexpire"),
    ),
    KeyKind(
        keys.lapses, "zset", "worker", Size(queue=80, worker=30), "an hour after the last heartbeat", area=LANES,
        wide=_lanes("zadd zrem zscore zremrangebyscore pexpire"),
    ),
)  # fmt: skip

_LETTER_KINDS = (
    KeyKind(
        keys.dead,
        "stream",
        "worker",
        Size(queue=400, letter=300),
        "`dead_ttl_s` after the last letter",
        grants=_LETTERS,
    ),
    KeyKind(
        keys.malformed,
        "stream",
        "worker",
        Size(queue=400, malformed=300),
        "`dead_ttl_s` after the last letter",
        grants=_LETTERS,
    ),
    KeyKind(
        keys.letter_sizes, "stream", "worker", Size(queue=4_400, letter=20), "with the letters", area=LETTER_COUNTS
    ),
    KeyKind(keys.letter_bytes, "string", "worker", Size(queue=80), "with the letters", area=LETTER_COUNTS),
)

_PRESENCE_KINDS = (
    KeyKind(
        keys.heartbeat, "string", "worker", Size(worker=90), "`heartbeat_ttl_s` after the last beat", area=WORKERS,
        grants=(Grant(_WORKER, "R", "mget"),),
    ),
    KeyKind(
        keys.looked, "string", "worker", Size(queue=70), "after seconds",
        grants=(Grant(_WORKER, "RW", "set strlen pttl"), SETS_ASIDE, _RUNS),
    ),
    KeyKind(
        keys.serving, "zset", "worker", Size(queue=70, worker=30), "with the last heartbeat",
        grants=(
            _IS_THERE, _CALLS, _ENROLS, Grant(_WORKER, "RW", "zcard zscore zrangebyscore exists"), SETS_ASIDE, _RUNS,
        ),
    ),
    KeyKind(
        keys.card, "hash", "worker", Size(queue=220), "with the last heartbeat",
        grants=(
            Grant(_CLIENTS, "R", "hgetall"), Grant(_WORKER, "RW", "hmget hset pttl pexpire pexpiretime del"),
            SETS_ASIDE, _RUNS, _DESCRIBES, _SHOWS,
        ),
    ),
    KeyKind(
        keys.digests, "hash", "worker", Size(queue=80, worker=90), "with the last heartbeat",
        grants=(Grant(_WORKER, "RW", "hset hdel pttl pexpire del"), SETS_ASIDE, _RUNS, _DESCRIBES, _SHOWS),
    ),
    KeyKind(
        keys.queues, "zset", "worker", Size(fleet=70, queue=20), "with the last heartbeat of all queues",
        grants=(Grant(_CLIENTS, "R", "zrange"), _ENROLS, SETS_ASIDE, _RUNS, _LISTS),
    ),
)  # fmt: skip

_REQUEST_KINDS = (
    KeyKind(
        keys.reply, "stream", "worker", Size(reply=4_300, token=30),
        "`reply_ttl_s`; from its end, `reply_ttl_after_end_s` or `keep_s`",
        grants=(
            _READS, Grant(("gateway",), "W", "expire"), Grant(_WORKER, "RW", "xadd xrange xrevrange exists pexpire"),
            _RUNS, Grant(_OPERATOR, "R", "xrange xrevrange"),
        ),
    ),
    KeyKind(
        keys.state, "hash", "worker", Size(reply=270), "with the reply",
        grants=(
            _READS, Grant(_WORKER, "RW", "hget hmget hset hsetnx hincrby exists pexpire"), _RUNS,
            Grant(_OPERATOR, "R", "hmget"),
        ),
    ),
    KeyKind(
        keys.cancel, "string", "client", Size(cancelled=80), "after a day",
        grants=(_CANCELS, Grant(_WORKER, "RW", "exists del"), _RUNS),
    ),
)  # fmt: skip

TABLE = (
    KeyKind(
        keys.requests, "stream", "client", Size(queue=600, request=320),
        grants=(
            _ENQUEUES, Grant(("producer",), "W", "xadd xlen exists xgroup|create"),
            Grant(("gateway",), "RW", "xadd xlen xrange exists xgroup|create"),
            Grant(
                _WORKER, "RW",
                "xgroup|create xgroup|delconsumer xreadgroup xrange xlen xack xdel xclaim xpending xinfo|groups "
                "xinfo|consumers exists",
            ),
            BLOCKS, _RUNS, Grant(("autoscaler",), "R", "xlen xpending xinfo|groups", is_root=True),
            Grant(_OPERATOR, "R", "xlen xinfo|groups xinfo|consumers xpending"),
            Grant(_OPERATOR, "W", "xadd exists xgroup|create"), _REPLAYS, _SHOWS,
        ),
    ),
    *_LANE_KINDS,
    KeyKind(
        keys.cancelled, "set", "client", Size(cancelled=60), "a day after the last cancel",
        grants=(_NOTES_CANCELS, Grant(_WORKER, "RW", "spop exists"), SETS_ASIDE, _RUNS),
    ),
    KeyKind(
        keys.seen, "string", "client", Size(remembered=80), "after `dedupe_window_s`",
        grants=(
            _IS_THERE, _ENQUEUES, Grant(_SENDERS, "RW", "get set expire"), Grant(("reader",), "R", "get"),
            Grant(_WORKER, "RW", "get set"), SETS_ASIDE, _RUNS, Grant(_OPERATOR, "RW", "get set", "replays"), _REPLAYS,
        ),
    ),
    *_LETTER_KINDS,
    *_PRESENCE_KINDS,
    KeyKind(
        keys.calls, "stream", "client", Size(queue=470), "a minute after the last call",
        grants=(
            _CALLS, Grant(_SENDERS, "W", "xadd xlen xtrim exists pexpire xgroup|create"),
            Grant(
                _WORKER, "RW",
                "xgroup|create xgroup|delconsumer xreadgroup xack xdel xclaim xpending xinfo|consumers pexpire",
            ),
            SETS_ASIDE, _RUNS,
        ),
    ),
    KeyKind(
        keys.answers, "stream", "worker", Size(client=4_400), "a minute after the last answer",
        grants=(
            Grant(_SENDERS, "R", "xread xrange xrevrange exists hget hmget", is_root=True),
            Grant(_SENDERS, "W", "xtrim"), Grant(_WORKER, "W", "xadd pexpire"), SETS_ASIDE, _RUNS,
        ),
    ),
    KeyKind(
        keys.report, "string", "worker", Size(worker=200, running=140), "seconds after the last report",
        grants=(Grant(_WORKER, "W", "set del"), _RUNS, Grant(_OPERATOR, "R", "get"), _SHOWS),
    ),
    KeyKind(
        keys.reports, "zset", "worker", Size(queue=70, worker=30), "a minute after the last report",
        grants=(Grant(_WORKER, "RW", _ENROLLING, "who reports"), SETS_ASIDE, _RUNS, _LISTS, _SHOWS),
    ),
    KeyKind(keys.starting, "string", "worker", Size(worker=90), "with the process", area=WORKERS),
    KeyKind(
        keys.drain, "string", "operator", Size(worker=100), "after a day",
        grants=(_HOLDS_NAMES, SETS_ASIDE, _RUNS, Grant(_OPERATOR, "RW", "get set", "drains"), _SHOWS),
    ),
    *_REQUEST_KINDS,
    KeyKind(
        keys.wake, "stream", "client", Size(client=4_400), "after a minute",
        grants=(_READS, Grant(_CLIENTS, "W", "xadd expire del")),
    ),
)  # fmt: skip

"""Every kind of key of the gateway's own: what `names` names, in the same order, and what each role may do with it."""

from __future__ import annotations

from penstock.gateway.store import names
from penstock.protocol.key_kinds import Area, Grant, KeyKind

_SCRIPTS = "eval evalsha"
API_KEYS = Area(
    ("penstock:gateway:keys:{keys}:*",),
    (
        Grant(("gateway",), "R", "hget hlen xread xrevrange eval_ro evalsha_ro"),
        Grant(
            ("operator",), "RW",
            f"hdel hexists hget hgetall hkeys hlen hmget hset hsetnx xadd {_SCRIPTS} eval_ro evalsha_ro",
        ),
    ),
)  # fmt: skip
"""API keys: operators make them, and a gateway, which lets in whom they name, may only read them."""

OWN = Area(
    ("penstock:gateway:{*}:*",),
    (
        Grant(
            ("gateway",), "RW",
            "del exists expire pexpire pttl ttl unlink append get getrange incrby decrby mget set strlen "
            "hdel hexists hget hgetall hincrby hkeys hlen hmget hscan hset hsetnx "
            "zadd zcard zcount zrandmember zrange zrangebyscore zrem zremrangebyscore zscore "
            f"xadd xdel xlen xrange xread xrevrange xtrim llen lrange renamenx rpush {_SCRIPTS}",
        ),
    ),
)  # fmt: skip
"""What gateways keep and share, junk that they set aside among it."""

AREAS = (OWN, API_KEYS)

TABLE = (
    KeyKind(names.api_keys, "hash", "operator", area=API_KEYS),
    KeyKind(names.revocations, "hash", "operator", area=API_KEYS),
    KeyKind(names.revocation_notices, "stream", "operator", area=API_KEYS),
    KeyKind(names.key_requests, "hash", "gateway", "a minute after the last request", area=OWN),
    KeyKind(names.key_running, "zset", "gateway", "after the last lease", area=OWN),
    KeyKind(names.key_open, "hash", "gateway", "after the last tab", area=OWN),
    KeyKind(names.key_tokens, "hash", "gateway", "a minute after the last charge", area=OWN),
    KeyKind(names.key_charges, "zset", "gateway", "after the last payment", area=OWN),
    KeyKind(names.unsettled, "zset", "gateway", "after the last tab", area=OWN),
    KeyKind(names.record, "string", "gateway", "as its client asked", area=OWN),
    KeyKind(names.owned, "zset", "gateway", "after the last file or batch", area=OWN),
    KeyKind(names.body, "hash", "gateway", "with the file", area=OWN),
    KeyKind(names.file_users, "zset", "gateway", "with the last batch", area=OWN),
    KeyKind(names.batch_leases, "zset", "gateway", area=OWN),
    KeyKind(names.batch_holders, "hash", "gateway", area=OWN),
    KeyKind(names.batch_progress, "hash", "gateway", "with the batch", area=OWN),
    KeyKind(names.ledger_sizes, "hash", "gateway", "with the last charge", area=OWN),
    KeyKind(names.ledger_expiries, "zset", "gateway", "with the last charge", area=OWN),
    KeyKind(names.fingerprint, "string", "gateway", "with the reply", area=OWN),
    KeyKind(names.readers, "zset", "gateway", "a day after the last sign of a reader", area=OWN),
    KeyKind(names.swept, "string", "gateway", "after seconds", area=OWN),
    KeyKind(names.probe, "string", "gateway", "at once", area=OWN),
)

"""Every kind of key of the gateway's own: what `names` names, in the same order, and what each role may do with it."""

from __future__ import annotations

from penstock.gateway.store import names
from penstock.protocol.key_kinds import Area, Grant, KeyKind, Size

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
"""API keys. Operators make them. A gateway, which decides by them whom to let in, may only read them."""

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
"""What gateways keep and share, including junk that they set aside."""

AREAS = (OWN, API_KEYS)

TABLE = (
    KeyKind(names.api_keys, "hash", "operator", Size(api_key=330), area=API_KEYS),
    KeyKind(names.revocations, "hash", "operator", Size(fleet=80, revoked=40), area=API_KEYS),
    KeyKind(names.revocation_notices, "stream", "operator", Size(fleet=4_300, revoked=60), area=API_KEYS),
    KeyKind(names.key_requests, "hash", "gateway", Size(api_key=700), "a minute after the last request", area=OWN),
    KeyKind(names.key_running, "zset", "gateway", Size(answering=80), "after the last lease", area=OWN),
    KeyKind(names.key_open, "hash", "gateway", Size(api_key=80, answering=60), "after the last tab", area=OWN),
    KeyKind(names.key_tokens, "hash", "gateway", Size(api_key=800), "a minute after the last charge", area=OWN),
    KeyKind(names.key_charges, "zset", "gateway", Size(charged=60), "after the last payment", area=OWN),
    KeyKind(names.unsettled, "zset", "gateway", Size(fleet=80, answering=70), "after the last tab", area=OWN),
    KeyKind(names.record, "string", "gateway", Size(document=110), "as its client asked", area=OWN),
    KeyKind(names.owned, "zset", "gateway", Size(file=70), "after the last file or batch", area=OWN),
    KeyKind(names.body, "hash", "gateway", Size(file=110, line=60), "with the file", area=OWN),
    KeyKind(names.file_users, "zset", "gateway", Size(batch=110), "with the last batch", area=OWN),
    KeyKind(names.batch_leases, "zset", "gateway", Size(fleet=80, batch=60), area=OWN),
    KeyKind(names.batch_holders, "hash", "gateway", Size(fleet=90, batch=70), area=OWN),
    KeyKind(names.batch_progress, "hash", "gateway", Size(batch=450), "with the batch", area=OWN),
    KeyKind(names.ledger_sizes, "hash", "gateway", Size(fleet=80, document=60), "with the last charge", area=OWN),
    KeyKind(names.ledger_expiries, "zset", "gateway", Size(fleet=80, document=60), "with the last charge", area=OWN),
    KeyKind(names.fingerprint, "string", "gateway", Size(repeatable=180), "with the reply", area=OWN),
    KeyKind(
        names.readers,
        "zset",
        "gateway",
        Size(fleet=80, answering=65),
        "a day after the last sign of a reader",
        area=OWN,
    ),
    KeyKind(names.swept, "string", "gateway", Size(fleet=90), "after seconds", area=OWN),
    KeyKind(names.probe, "string", "gateway", Size(fleet=90), "at once", area=OWN),
)

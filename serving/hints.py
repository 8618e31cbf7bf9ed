"""Hints for operators about errors from Redis."""

from __future__ import annotations

from penstock.protocol.redis.faults import Meaning, is_away, meaning_of

ROLES = "deploy/redis/users.acl has what the user of each role may do"

_URL = "--redis-url or PENSTOCK_REDIS_URL"
_HINTS = {
    Meaning.AWAY: f"start it with redis-server or docker compose up redis, or set {_URL}",
    Meaning.LOADING: "it reads its data from disk: wait",
    Meaning.WRONG_PASSWORD: f"check user and password in {_URL}: redis://USER:PASSWORD@HOST:PORT, special characters as"
    " %XX",
    Meaning.NO_PASSWORD: f"the server wants a password: put it into {_URL}, as redis://:PASSWORD@HOST:PORT",
    Meaning.NEEDLESS_PASSWORD: f"the server wants no password: leave it out of {_URL}",
    Meaning.NOT_PERMITTED: ROLES,
}


def hint_for(error: BaseException) -> str:
    """Returns one sentence, without address or password."""
    return _HINTS.get(meaning_of(error), "penstock doctor looks at the server")


def public_reason(error: BaseException) -> str:
    """Returns why a worker has to wait, for callers of its health port. The Redis library's text would name the
    address.
    """
    return "no connection to Redis" if is_away(error) else f"Redis is not available: {error}"

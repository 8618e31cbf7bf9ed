"""What an operator can do about an error from Redis."""

from __future__ import annotations

from penstock.producer.redis.faults import Meaning, is_away, meaning_of

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
    """One sentence. It names no address and no password."""
    return _HINTS.get(meaning_of(error), "penstock doctor looks at the server")


def public_reason(error: BaseException) -> str:
    """Why a worker has to wait, for whoever asks its health port: the Redis library names the server's address."""
    return "no connection to Redis" if is_away(error) else f"Redis is not available: {error}"

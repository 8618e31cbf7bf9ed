"""What an operator can do about an error from Redis."""

from __future__ import annotations

from redis import exceptions

from penstock.producer.redis.connection import UNREACHABLE

ROLES = "deploy/redis/users.acl has what the user of each role may do"

_URL = "--redis-url or PENSTOCK_REDIS_URL"
_WRONG_PASSWORD = ("WRONGPASS", "invalid username-password", "invalid password")
_NEEDLESS_PASSWORD = ("called without any password configured",)
_NO_PASSWORD = ("NOAUTH", "Authentication required")  # the Redis library takes the code off

# What a script was not allowed to do comes as a general error, with these words of Valkey and of Redis.
SCRIPT_DENIED = ("ACL failure in script", "The user executing the script can't")


def hint_for(error: BaseException) -> str:
    """One sentence. It names no address and no password."""
    if _says(error, _NEEDLESS_PASSWORD):
        return f"the server wants no password: leave it out of {_URL}"
    if _says(error, _WRONG_PASSWORD):
        return f"check user and password in {_URL}: redis://USER:PASSWORD@HOST:PORT, special characters as %XX"
    if _says(error, _NO_PASSWORD):
        return f"the server wants a password: put it into {_URL}, as redis://:PASSWORD@HOST:PORT"
    if isinstance(error, exceptions.NoPermissionError) or str(error).startswith(SCRIPT_DENIED):
        return ROLES
    if isinstance(error, exceptions.BusyLoadingError):
        return "it reads its data from disk: wait"
    if isinstance(error, UNREACHABLE):
        return f"start it with redis-server or docker compose up redis, or set {_URL}"
    return "penstock doctor looks at the server"


def public_reason(error: BaseException) -> str:
    """Why a worker has to wait, for whoever asks its health port: the Redis library names the server's address."""
    if isinstance(error, UNREACHABLE) and not isinstance(error, exceptions.BusyLoadingError):
        return "no connection to Redis"
    return f"Redis is not available: {error}"


def is_about_the_password(error: BaseException) -> bool:
    """Also where a cluster client says that it reached no node, of which each wanted another password."""
    return _says(error, (*_WRONG_PASSWORD, *_NO_PASSWORD, *_NEEDLESS_PASSWORD))


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    return any(word in str(error) for word in words)

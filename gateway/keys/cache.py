"""The API keys as one gateway process knows them, at most a second old.

A process that has seen keys keeps requiring one, even if Redis has none left: then Redis has lost its data, and nobody
may get in who could not before.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

import structlog

from penstock.gateway.errors import ApiError
from penstock.gateway.keys.records import ApiKey
from penstock.gateway.keys.secrets import Secret, parse_secret
from penstock.gateway.keys.store import FoundKey, KeyStore

_log = structlog.get_logger(__name__)

MAX_AGE_S = 1.0
MAX_KNOWN = 4096
"""Number of keys, and of tried ids without a key, that are cached. The rest is looked up again."""


@dataclass(frozen=True, slots=True)
class _Known:
    found: FoundKey
    at_s: float  # on the process's clock


@dataclass(frozen=True, slots=True)
class Presented:
    """A key that a client has presented."""

    key: ApiKey
    expires_in_s: float | None


class KeyCache:
    """Caches and checks keys.

    Args:
        store: the store of keys.
        is_required: whether to refuse everybody while there are no keys.
    """

    def __init__(self, store: KeyStore, *, is_required: bool) -> None:
        self._store = store
        self._is_required = is_required
        self._has_seen_keys = False
        self._had_keys = False  # at the last look
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def check(self, presented: str | None) -> Presented | None:
        """Returns the key presented; None: there are no keys, and none is required.

        Raises:
            ApiError: a key is required, and this is not one (401).
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        secret = parse_secret(presented) if presented else None
        known = await self._look_up(secret.key_id if secret else "")
        if not known.found.num_keys and not self._is_required and not self._has_seen_keys:
            return None
        if not presented:
            raise _unauthorized("an API key is needed: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`")
        if secret is None:
            raise _unauthorized("this gateway does not know the API key; its keys begin with sk-penstock-")
        return _checked(secret, known)

    def forget(self, key_id: str) -> None:
        self._known.pop(key_id, None)

    async def _look_up(self, key_id: str) -> _Known:
        known = self._known.get(key_id)
        if known is not None and time.monotonic() - known.at_s < MAX_AGE_S:
            return known
        asked_at_s = time.monotonic()  # the answer may be as old as that
        self._known[key_id] = known = _Known(await self._store.find(key_id), asked_at_s)
        self._note_whether_there_are_keys(known.found.num_keys > 0)
        self._known.move_to_end(key_id)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known

    def _note_whether_there_are_keys(self, are_there: bool) -> None:
        if not are_there and self._had_keys:
            _log.error("api_keys_lost", hint="restore Redis, or make new keys: penstock keys create")
        self._had_keys = are_there
        self._has_seen_keys |= are_there


def _checked(secret: Secret, known: _Known) -> Presented:
    found = known.found
    if found.key is None or not secret.fits(found.key.digest):
        if found.problem:
            raise _unauthorized(f"API key {secret.key_id} can't be used: {found.problem}")
        raise _unauthorized("this gateway does not know the API key")
    if found.revoked_ms is not None:
        raise revoked(secret.key_id)
    if found.left_ms is None:
        return Presented(found.key, None)
    left_s = found.left_ms / 1000 - (time.monotonic() - known.at_s)
    if left_s <= 0:
        raise expired(secret.key_id)
    return Presented(found.key, left_s)


def revoked(key_id: str) -> ApiError:
    return _unauthorized(f"API key {key_id} was revoked")


def expired(key_id: str) -> ApiError:
    return _unauthorized(f"API key {key_id} has expired")


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, type="authentication_error", code="invalid_api_key")

"""API keys in Redis. `penstock keys` and the gateway share this module, which needs only the light client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from penstock.gateway.keys.records import ApiKey
from penstock.gateway.store import names
from penstock.protocol import lua
from penstock.protocol.queue.enqueue import Execute

_FIND = lua.load("penstock.gateway.keys", "find")
_REVOKE = lua.load("penstock.gateway.keys", "revoke")

MAX_NOTICES = 1000


@dataclass(frozen=True, slots=True)
class FoundKey:
    """A key as Redis had it at `now_ms`, on its clock."""

    key_id: str
    num_keys: int  # including revoked and expired ones
    key: ApiKey | None  # None: there is none, or it can't be read
    problem: str | None  # why it can't be read
    revoked_ms: int | None
    now_ms: int

    @property
    def state(self) -> Literal["active", "revoked", "expired", "unreadable", "unknown"]:
        if self.revoked_ms is not None:
            return "revoked"
        if self.key is None:
            return "unreadable" if self.problem else "unknown"
        return "active" if self.left_ms is None or self.left_ms > 0 else "expired"

    @property
    def left_ms(self) -> int | None:
        """Time until the key expires; None: it never does."""
        return None if self.key is None or self.key.expires_ms is None else self.key.expires_ms - self.now_ms


class KeyStore:
    """Stores keys.

    Args:
        execute: sends one command, which may run twice; answers are bytes.
    """

    def __init__(self, execute: Execute) -> None:
        self._execute = execute

    async def find(self, key_id: str) -> FoundKey:
        """Finds a key.

        Raises:
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        command = lua.call(_FIND, (names.api_keys(), names.revocations()), (key_id,), only_reads=True)
        num_keys, record, revoked_ms, now_ms = await self._execute(*command)
        key, problem = (None, None) if record is None else _read(record)
        return FoundKey(key_id, num_keys, key, problem, None if revoked_ms is None else _moment(revoked_ms), now_ms)

    async def add(self, key: ApiKey) -> None:
        """Adds a new key."""
        await self._execute("HSETNX", names.api_keys(), key.id, key.model_dump_json(exclude_defaults=True))

    async def list(self) -> list[FoundKey]:
        """Returns all keys, oldest first."""
        ids = await self._execute("HKEYS", names.api_keys())
        found = [await self.find(key_id.decode(errors="replace")) for key_id in ids]
        return sorted(found, key=lambda each: (each.key.created_ms if each.key else 0, each.key_id))

    async def revoke(self, key_id: str) -> bool:
        """Revokes a key. Returns whether it was there. Gateways are notified at once."""
        keys = (names.api_keys(), names.revocations(), names.revocation_notices())
        return bool(await self._execute(*lua.call(_REVOKE, keys, (key_id, MAX_NOTICES))))


def _moment(value: bytes) -> int:
    """Parses a time. An invalid one still counts: the key was revoked."""
    return int(value) if value.isdigit() and len(value) < 19 else 0


def _read(record: bytes) -> tuple[ApiKey | None, str | None]:
    """Returns the key, or why it can't be read."""
    try:
        return ApiKey.model_validate_json(record), None
    except ValidationError as error:
        fields = sorted({str(each["loc"][0]) if each["loc"] else "all of it" for each in error.errors()})
        return None, f"this version can't read {', '.join(fields)[:200]}"

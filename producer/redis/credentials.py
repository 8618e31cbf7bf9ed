"""User and password of new connections, read anew where they came from: a process outlives a rotated password."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import BaseModel, PrivateAttr
from redis.credentials import CredentialProvider

from penstock.producer.redis.address import Address, parse_url

Login: TypeAlias = tuple[str | None, str | None]

READ_EVERY_S = 1.0

log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class _Source:
    read: Callable[[], Any] | None = field(default=None, compare=False)  # settings that say the same are the same
    places: Mapping[str, str] = field(default_factory=dict, compare=False)


class Rereadable(BaseModel):
    """Settings that can be read once more while the process runs. Those that are there are not changed by it."""

    _source: _Source = PrivateAttr(_Source())

    def reread_by(self, read: Callable[[], Any], places: Mapping[str, str]) -> None:
        """Has `read` give the same settings, as they are set by then; `places` are those where they stand, by name."""
        self._source = _Source(read, places)

    def place(self, name: str) -> str:
        """Where a setting stands, for messages; its name, if it is set nowhere."""
        return self._source.places.get(name, name)

    def check(self) -> None:
        """Passes if what no field can say by itself holds. Its errors have `settings`, the names they are about."""

    def address(self, name: str = "redis_url") -> Address:
        """What the setting `name` says, with user and password that are read anew for new connections."""
        read = self._source.read
        return parse_url(getattr(self, name)).reading(None if read is None else lambda: getattr(read(), name))


class Credentials(CredentialProvider):
    """Those of one server's connections.

    What cannot be read, as while a file is being written, leaves those that were known.

    Args:
        address: has the first ones, and may have where they are read anew.
        is_sentinel: whether those of its sentinels are meant.
    """

    def __init__(self, address: Address, *, is_sentinel: bool = False) -> None:
        self._read_anew = address.read_anew
        self._is_sentinel = is_sentinel
        self._login = self._of(address)
        self._read_s = -READ_EVERY_S
        self._is_read = asyncio.Lock()

    async def get_credentials_async(self) -> Any:
        """What AUTH is sent with; nothing: it is not sent."""
        await self.look()
        return tuple(part for part in self._login if part is not None)

    async def look(self) -> bool:
        """Reads them anew, once a second at most. Whether they are others now."""
        if self._read_anew is None:
            return False
        async with self._is_read:
            if time.monotonic() - self._read_s < READ_EVERY_S:
                return False
            before = self._login
            try:
                self._login = self._of(parse_url(await asyncio.to_thread(self._read_anew)))
            except Exception as error:  # whatever a settings file holds meanwhile
                log.warning("user and password of Redis could not be read anew: %s", error)
            self._read_s = time.monotonic()
            return self._login != before

    def _of(self, address: Address) -> Login:
        if self._is_sentinel:
            return address.sentinel_username, address.sentinel_password
        return address.username, address.password

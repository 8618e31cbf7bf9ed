"""User and password of new connections, read again from their source: a process outlives a rotated password."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import BaseModel, PrivateAttr
from redis.credentials import CredentialProvider

from penstock.protocol.redis.address import Address, parse_url

Login: TypeAlias = tuple[str | None, str | None]

READ_EVERY_S = 1.0

log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class _Source:
    read: Callable[[], Any] | None = field(default=None, compare=False)  # settings with equal values are equal
    places: Mapping[str, str] = field(default_factory=dict, compare=False)


class Rereadable(BaseModel):
    """Settings that can be read again while the process runs. The existing ones do not change."""

    _source: _Source = PrivateAttr(_Source())

    def reread_by(self, read: Callable[[], Any], places: Mapping[str, str]) -> None:
        """Sets `read` as the source of the same settings with their current values; `places` says where each is set, by
        name.
        """
        self._source = _Source(read, places)

    def place(self, name: str) -> str:
        """Returns where a setting is set, for messages; its name, if it is set nowhere."""
        return self._source.places.get(name, name)

    def check(self) -> None:
        """Checks conditions that span several fields. Its errors have `settings`, the names they are about."""

    def address(self, name: str = "redis_url") -> Address:
        """Returns the address in the setting `name`, with user and password that are read again for new connections."""
        read = self._source.read
        return parse_url(getattr(self, name)).reading(None if read is None else lambda: getattr(read(), name))


class Credentials(CredentialProvider):
    """Credentials for the connections to one server.

    If they cannot be read, as while a file is being written, the known ones stay.

    Args:
        address: has the first credentials, and perhaps a function that reads them again.
        is_sentinel: whether to take those of its sentinels.
    """

    def __init__(self, address: Address, *, is_sentinel: bool = False) -> None:
        self._read_anew = address.read_anew
        self._is_sentinel = is_sentinel
        self._login = self._login_for(address)
        self._read_s = -READ_EVERY_S
        self._is_read = asyncio.Lock()

    async def get_credentials_async(self) -> Any:
        """Returns the arguments of AUTH; empty: it is not sent."""
        await self.look()
        return tuple(part for part in self._login if part is not None)

    async def look(self) -> bool:
        """Reads the credentials again, at most once a second. Returns whether they have changed."""
        if self._read_anew is None:
            return False
        async with self._is_read:
            if time.monotonic() - self._read_s < READ_EVERY_S:
                return False
            before = self._login
            try:
                self._login = self._login_for(parse_url(await asyncio.to_thread(self._read_anew)))
            except Exception as error:  # whatever a settings file holds meanwhile
                log.warning("user and password of Redis could not be read anew: %s", error)
            self._read_s = time.monotonic()
            return self._login != before

    def _login_for(self, address: Address) -> Login:
        if self._is_sentinel:
            return address.sentinel_username, address.sentinel_password
        return address.username, address.password

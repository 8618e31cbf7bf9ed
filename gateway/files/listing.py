"""Lists an owner's records of one kind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.gateway.settings import MAX_FILE_S
from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.gateway.store.records import Records, StoredDocument
from penstock.protocol import lua

MAX_LISTED_S = 2 * MAX_FILE_S
"""Longer than anything is kept."""

_LIST = lua.load("penstock.gateway.files", "list")


class Listing:
    """Records of one kind by owner."""

    def __init__(self, kind: str, store: Store, records: Records) -> None:
        self._kind = kind
        self._store = store
        self._records = records

    async def add(self, owner: str, record_id: str) -> None:
        await self._store.execute(*lua.call(_LIST, [names.owned(self._kind, owner)], [record_id, MAX_LISTED_S]))

    async def remove(self, owner: str, *record_ids: str) -> None:
        await self._store.execute("ZREM", names.owned(self._kind, owner), *record_ids)

    async def ids(self, owner: str) -> list[str]:
        """Returns ids, oldest first. Some may have expired."""
        found: list[bytes] = await self._store.execute("ZRANGE", names.owned(self._kind, owner), 0, -1)
        return [each.decode(errors="replace") for each in found]

    async def read(self, owner: str, record_ids: Sequence[str]) -> list[StoredDocument]:
        """Returns the records that exist, and removes expired ones from the list."""
        found = await asyncio.gather(*(self._records.read(self._kind, each) for each in record_ids))
        gone = [each for each, record in zip(record_ids, found, strict=True) if record is None]
        if gone:
            await self.remove(owner, *gone)
        return [record for record in found if record is not None]

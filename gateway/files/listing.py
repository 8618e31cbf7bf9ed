"""What an owner has of one kind, as lists of OpenAI's API show it: in pages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request

from penstock.gateway.errors import ApiError
from penstock.gateway.settings import MAX_FILE_S
from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.gateway.store.records import Record, Records
from penstock.producer.redis import lua

MAX_LISTED_S = 2 * MAX_FILE_S
"""For longer than anything is kept."""

_LIST = lua.load("penstock.gateway.files", "list")


class Listing:
    """The records of one kind by owner."""

    def __init__(self, kind: str, store: Store, records: Records) -> None:
        self._kind = kind
        self._store = store
        self._records = records

    async def add(self, owner: str, record_id: str) -> None:
        await self._store.execute(*lua.call(_LIST, [names.owned(self._kind, owner)], [record_id, MAX_LISTED_S]))

    async def remove(self, owner: str, *record_ids: str) -> None:
        await self._store.execute("ZREM", names.owned(self._kind, owner), *record_ids)

    async def ids(self, owner: str) -> list[str]:
        """Oldest first. Some may have expired."""
        return [each.decode() for each in await self._store.execute("ZRANGE", names.owned(self._kind, owner), 0, -1)]

    async def read(self, owner: str, record_ids: Sequence[str]) -> list[Record]:
        """Those that are there; what has expired is no longer listed."""
        found = await asyncio.gather(*(self._records.read(self._kind, each) for each in record_ids))
        gone = [each for each, record in zip(record_ids, found, strict=True) if record is None]
        if gone:
            await self.remove(owner, *gone)
        return [record for record in found if record is not None]


def is_ascending(asked: Request) -> bool:
    """`order`; the newest come first where it is left out."""
    order = asked.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order: is asc or desc, not {order[:80]!r}", param="order", code="invalid_value")
    return order == "asc"


def limit_of(asked: Request, *, default: int, largest: int) -> int:
    """`limit`."""
    text = asked.query_params.get("limit", str(default))
    if text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= largest:
        return int(text)
    message = f"limit: is a number from 1 to {largest}, not {text[:80]!r}"
    raise ApiError(400, message, param="limit", code="invalid_value")


def behind(asked: Request, ids: Sequence[str]) -> Sequence[str]:
    """Those behind `after`."""
    after = asked.query_params.get("after")
    if after is None:
        return ids
    if after not in ids:
        raise ApiError(404, f"after: {after[:200]!r} is not there", param="after", code="not_found")
    return ids[ids.index(after) + 1 :]


def page(documents: Sequence[dict[str, object]], *, has_more: bool) -> dict[str, object]:
    return {
        "object": "list",
        "data": documents,
        "first_id": documents[0]["id"] if documents else None,
        "last_id": documents[-1]["id"] if documents else None,
        "has_more": has_more,
    }

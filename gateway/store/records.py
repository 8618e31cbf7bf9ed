"""Documents that clients may ask for later, each under its own key that expires."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter

from penstock.gateway.damage import UNREADABLE, tell
from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.gateway.store.ledger import Ledger
from penstock.producer import ServerRefused
from penstock.protocol.wire import ID_PATTERN

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A stored document."""

    kind: str
    id: str
    document: Mapping[str, Any]
    num_bytes: int

    def restored(self, kind: TypeAdapter[T], **more: Any) -> T | None:
        """Builds an object from the fields; None: it cannot be read, which is logged."""
        try:
            return kind.validate_python({**self.document, **more})
        except UNREADABLE:
            tell(names.record(self.kind, self.id))
            return None

    @property
    def name(self) -> str:
        """Name in the ledger."""
        return name_of(self.kind, self.id)


def name_of(kind: str, record_id: str) -> str:
    return f"{kind}/{record_id}"


class Records:
    """JSON documents by kind and id, within the ledger's limit."""

    def __init__(self, store: Store, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger

    async def create(
        self, kind: str, record_id: str, document: Mapping[str, Any], *, ttl_s: int, more_bytes: int = 0
    ) -> StoredDocument:
        """Stores a document for `ttl_s`, with `created_at` (seconds of the server's clock), unless there is one.

        Args:
            kind: the kind of document.
            record_id: the same id in another kind is another record.
            document: a JSON object.
            ttl_s: from now.
            more_bytes: bytes to be stored elsewhere because of it, as far as known.

        Returns:
            The record now stored: it has the same id, so it is of the same request, but may have been made before.

        Raises:
            ApiError: it is too much to keep (507).
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        size = len(_encode(document))
        now_ms = await self._ledger.charge(name_of(kind, record_id), size + more_bytes, ttl_s)
        value = _encode({**document, "created_at": now_ms // 1000})
        is_new = await self._store.execute("SET", names.record(kind, record_id), value, "NX", "EX", ttl_s)
        there = None if is_new else await self.read(kind, record_id)
        return there or StoredDocument(kind, record_id, json.loads(value), len(value))

    async def read(self, kind: str, record_id: str) -> StoredDocument | None:
        """Returns the record; None: there is none, it has expired, or it cannot be read.

        Raises:
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        key = names.record(kind, record_id)
        try:
            value = await self._store.execute("GET", key)
            return None if value is None else StoredDocument(kind, record_id, _decoded(value), len(value))
        except ServerRefused as error:
            if not error.is_junk:
                raise
        except UNREADABLE:
            pass
        tell(key)
        return None

    async def read_owned(self, kind: str, record_id: str, owner: str) -> StoredDocument | None:
        """Returns the record for a caller whose id may be anything; None: there is none, or it is another owner's.

        Raises:
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        record = await self.read(kind, record_id) if ID_PATTERN.fullmatch(record_id) else None
        return record if record is not None and record.document["owner"] == owner else None

    async def correct(self, record: StoredDocument, more_bytes: int) -> None:
        """Corrects the bytes stored elsewhere because of `record`."""
        await self._ledger.correct(record.name, record.num_bytes + more_bytes)

    async def delete(self, kind: str, record_id: str) -> bool:
        """Deletes a record. Returns whether there was one."""
        was_there = await self._store.execute("DEL", names.record(kind, record_id))
        await self._ledger.release(name_of(kind, record_id))
        return bool(was_there)


def _decoded(value: bytes) -> Mapping[str, Any]:
    """Decodes a record. Raises one of `UNREADABLE`: it is not valid."""
    document: Any = json.loads(value)
    if not (isinstance(document["owner"], str) and isinstance(document["created_at"], int)):
        raise TypeError("a record has an owner and a time")
    return cast("Mapping[str, Any]", document)


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()

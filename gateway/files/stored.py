"""A file in the store: its metadata, and the location of its bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from penstock.gateway.context import Caller
from penstock.gateway.errors import ApiError
from penstock.gateway.files.bodies import pieces
from penstock.gateway.files.listing import Listing
from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.gateway.store.records import Records, StoredDocument
from penstock.protocol import lua

KIND = "file"
PREFIX = "file-"

GRACE_S = 600
"""How long a file stays after its time: a batch that ends with its input still writes one error per line."""

_USE = lua.load("penstock.gateway.files", "use")
_USER = lua.load("penstock.gateway.files", "user")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Metadata of a file.

    Attributes:
        id: clients' name for it.
        owner: the API key's id; empty: callers without a key.
        filename: from its client, or the batch that made it.
        purpose: `batch` or `batch_output`.
        num_bytes: size of its body.
        ttl_s: counts from `created_at`.
        home: the upload or batch that made the body.
        body: the body's name there.
        created_at: seconds since 1970 on the server's clock.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    ttl_s: int
    home: str
    body: str
    created_at: int = 0

    @property
    def key(self) -> str:
        return names.body(self.home, self.body)

    @property
    def expires_at(self) -> int:
        return self.created_at + self.ttl_s

    def document(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


_KEPT = ("owner", "filename", "purpose", "num_bytes", "ttl_s", "home", "body")


class FileStore:
    """Files by id. Each belongs to its creator; for all others it does not exist."""

    def __init__(self, store: Store, records: Records) -> None:
        self._store = store
        self._records = records
        self.listing = Listing(KIND, store, records)

    async def create(self, file: StoredFile) -> StoredFile:
        """Makes a file of an existing body.

        Raises:
            ApiError: it is too much to keep (507).
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        document = {name: getattr(file, name) for name in _KEPT}
        record = await self._records.create(
            KIND, file.id, document, ttl_s=file.ttl_s + GRACE_S, more_bytes=file.num_bytes
        )
        await self.listing.add(file.owner, file.id)
        made = restored(record)
        return file if made is None else made

    async def read(self, file_id: str, caller: Caller, *, param: str | None = None) -> StoredFile:
        """Returns a file. Raises ApiError (404): the caller has none with this id, or it has expired."""
        record = await self._records.read_owned(KIND, file_id, caller.owner)
        file = None if record is None else restored(record)
        if file is not None:
            return file
        message = f"file {file_id[:200]!r} is not there: it never was, was deleted, or has expired"
        raise ApiError(404, message, param=param, code="not_found")

    async def find(self, file_id: str) -> StoredFile | None:
        """Returns a file, no matter who owns it."""
        record = await self._records.read(KIND, file_id)
        return None if record is None else restored(record)

    def pieces(self, file: StoredFile) -> AsyncIterator[bytes]:
        return pieces(self._store, file.key, file.num_bytes)

    async def use(self, file_id: str, batch_id: str, ttl_s: int) -> None:
        """Prevents deletion of the file until `leave`, or for `ttl_s`."""
        await self._store.execute(*lua.call(_USE, [names.file_users(file_id)], [batch_id, ttl_s]))

    async def leave(self, file_id: str, batch_id: str) -> None:
        await self._store.execute("ZREM", names.file_users(file_id), batch_id)

    async def delete(self, file: StoredFile) -> None:
        """Deletes a file. Raises ApiError (409): a batch that has not ended reads it."""
        users = await self._store.execute(*lua.call(_USER, [names.file_users(file.id)], []))
        if users:
            message = f"file {file.id} is the input of {users[0].decode(errors='replace')}, which has not ended"
            raise ApiError(409, message, type="conflict_error", code="file_in_use")
        await self._store.execute("UNLINK", file.key)
        await self._records.delete(KIND, file.id)
        await self.listing.remove(file.owner, file.id)


_STORED = TypeAdapter(StoredFile)


def restored(record: StoredDocument) -> StoredFile | None:
    """Reads a file from a record; None: it cannot be read."""
    return record.restored(_STORED, id=record.id)

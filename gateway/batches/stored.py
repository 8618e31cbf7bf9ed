"""A batch in the store: the request, and its progress."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from penstock.gateway.batches.leases import BatchLease
from penstock.gateway.context import Caller
from penstock.gateway.damage import UNREADABLE, tell
from penstock.gateway.errors import ApiError
from penstock.gateway.files.bodies import places_of
from penstock.gateway.files.listing import Listing
from penstock.gateway.files.stored import GRACE_S
from penstock.gateway.files.stored import PREFIX as FILE_PREFIX
from penstock.gateway.generation.idempotency import other_body
from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.gateway.store.records import Records, StoredDocument
from penstock.producer import ServerRefused
from penstock.protocol import lua

KIND = "batch"
PREFIX = "batch_"

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
BodyName = Literal["output", "errors"]

_BEGIN = lua.load("penstock.gateway.batches", "begin")
_CANCEL = lua.load("penstock.gateway.batches", "cancel")
_ADVANCE = lua.load("penstock.gateway.batches", "advance")
_KEEP = lua.load("penstock.gateway.batches", "keep")


TIMES = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip
NUMBERS = (
    "total", "completed", "failed", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens",
)  # fmt: skip
MOST_DIGITS = 18


class LeaseLost(Exception):
    """Another gateway runs the batch, or it has expired."""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """The request for a batch. It is immutable.

    Attributes:
        id: clients' name for it.
        owner: the API key's id; empty: callers without a key.
        endpoint: the endpoint of all its lines.
        input_file_id: the file with the lines.
        completion_window: as requested.
        window_s: time to complete it from `created_at` on; it ends no later than its input expires.
        metadata: the client's.
        output_ttl_s: how long the files with its results are kept.
        created_at: seconds since 1970 on the server's clock.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: int
    metadata: Mapping[str, str] | None
    output_ttl_s: int
    created_at: int = 0

    @property
    def expires_at(self) -> int:
        return self.created_at + self.window_s

    @property
    def ttl_s(self) -> int:
        """How long it is kept."""
        return self.window_s + self.output_ttl_s

    def file_id(self, name: BodyName) -> str:
        """Returns the id of the file that a body of results becomes."""
        return f"{FILE_PREFIX}{self.id.removeprefix(PREFIX)}-{name}"


_KEPT = (
    "owner", "endpoint", "input_file_id", "completion_window", "window_s", "metadata", "output_ttl_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """A batch's progress, as Redis has it."""

    fields: Mapping[str, str]

    @property
    def status(self) -> str:
        """Status of the batch; an invalid one counts as `failed`."""
        status = self.fields.get("status", "failed")
        return status if status in get_args(BatchStatus) else "failed"

    @property
    def is_readable(self) -> bool:
        """Whether all fields are in the form that gateways write."""
        return self.fields.get("status", "failed") == self.status and all(
            _is_number(self.fields.get(name, "0")) for name in (*NUMBERS, *TIMES)
        )

    def number(self, name: str) -> int:
        """Returns a number; an invalid one is 0."""
        text = self.fields.get(name, "0")
        return int(text) if _is_number(text) else 0

    def document(self, name: str) -> Any:
        """Returns a document; None: there is none."""
        try:
            return json.loads(self.fields.get(name, "null"))
        except UNREADABLE:
            return None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS


class BatchStore:
    """Batches by id. Each belongs to its creator; for all others it does not exist."""

    def __init__(self, store: Store, records: Records) -> None:
        self._store = store
        self._records = records
        self.listing = Listing(KIND, store, records)

    async def create(self, batch: StoredBatch) -> StoredBatch:
        """Stores the request for a batch, unless it is stored already.

        Raises:
            ApiError: this Idempotency-Key was used for another request (422), or it is too much to keep (507).
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        document = {name: getattr(batch, name) for name in _KEPT}
        there = restored(await self._records.create(KIND, batch.id, document, ttl_s=batch.ttl_s))
        if there is None or _client_fields(there) != _client_fields(batch):
            raise other_body()
        await self._store.execute(*lua.call(_BEGIN, [names.batch_progress(batch.id)], [batch.ttl_s]))
        return there

    async def read(self, batch_id: str, caller: Caller) -> StoredBatch:
        """Returns a batch. Raises ApiError (404): the caller has none with this id, or it has expired."""
        record = await self._records.read_owned(KIND, batch_id, caller.owner)
        batch = None if record is None else restored(record)
        if batch is not None:
            return batch
        message = f"batch {batch_id[:200]!r} is not there: it never was, or has expired"
        raise ApiError(404, message, code="not_found")

    async def find(self, batch_id: str) -> StoredBatch | None:
        """Returns a batch, no matter who owns it."""
        record = await self._records.read(KIND, batch_id)
        return None if record is None else restored(record)

    async def progress(self, batch_id: str) -> BatchProgress:
        """Returns a batch's progress. If it is lost, the batch counts as failed."""
        key = names.batch_progress(batch_id)
        try:
            flat: Any = await self._store.execute("HGETALL", key)
        except ServerRefused as error:
            if not error.is_junk:
                raise
            tell(key)
            return BatchProgress({})
        pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
        progress = BatchProgress(
            {name.decode(errors="replace"): value.decode(errors="replace") for name, value in pairs}
        )
        if not progress.is_readable:
            tell(key)
        return progress

    async def cancel(self, batch_id: str) -> str:
        """Cancels a batch, and returns its new status."""
        status: bytes | None = await self._store.execute(*lua.call(_CANCEL, [names.batch_progress(batch_id)], []))
        return "failed" if status is None else status.decode(errors="replace")

    async def advance(self, lease: BatchLease, status: BatchStatus, to: BatchStatus, **fields: str | int) -> str:
        """Moves from `status` to another one, or only sets `fields`. Returns the status that is set afterwards.

        Raises:
            LeaseLost: another gateway has the batch.
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        flat = [part for pair in fields.items() for part in pair]
        command = lua.call(_ADVANCE, [names.batch_progress(lease.batch_id)], [lease.token, status, to, *flat])
        now: bytes | None = await self._store.execute(*command)
        if now is None:
            raise LeaseLost(lease.batch_id)
        return now.decode(errors="replace")

    async def places(self, batch_id: str) -> set[int]:
        """Returns the numbers of the lines that have a result."""
        bodies = [places_of(self._store, names.body(batch_id, name)) for name in ("output", "errors")]
        return {place for found in await asyncio.gather(*bodies) for place in found}

    async def keep(
        self, lease: BatchLease, place: int, result: bytes, ttl_s: int, *, is_good: bool, counts: Mapping[str, int]
    ) -> None:
        """Keeps a line's result and adds to the batch's counts, unless the line has a result.

        Raises:
            LeaseLost: another gateway has the batch.
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        home, flat = lease.batch_id, [part for pair in counts.items() for part in pair]
        keys = (names.batch_progress(home), names.body(home, "output"), names.body(home, "errors"))
        command = lua.call(_KEEP, keys, (lease.token, place, int(is_good), result, ttl_s, *flat))
        if not await self._store.execute(*command):
            raise LeaseLost(home)

    async def expire_body(self, batch: StoredBatch, name: BodyName) -> None:
        """Sets a body's expiry to that of the file that it has become."""
        await self._store.execute("EXPIRE", names.body(batch.id, name), batch.output_ttl_s + GRACE_S)


def _client_fields(batch: StoredBatch) -> Mapping[str, Any]:
    return {name: getattr(batch, name) for name in _OF_CLIENT}


_OF_CLIENT = ("owner", "endpoint", "input_file_id", "completion_window", "metadata")


_STORED = TypeAdapter(StoredBatch)


def restored(record: StoredDocument) -> StoredBatch | None:
    """Reads a batch from a record; None: it cannot be read."""
    return record.restored(_STORED, id=record.id)

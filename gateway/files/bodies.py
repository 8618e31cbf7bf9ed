"""Bodies of files. Each is a hash of pieces, which are read in the order of their numbers."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from penstock.gateway.damage import tell
from penstock.gateway.errors import ApiError
from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.gateway.store.ledger import Ledger
from penstock.producer import ServerRefused
from penstock.protocol import lua

PIECE_BYTES = 256 << 10
PIECES_A_READ = 16
UPLOAD_S = 3600
"""How long the pieces of an unfinished upload are kept."""

_PUT = lua.load("penstock.gateway.files", "put")


class Upload:
    """A body that is being written. Its size is charged before it is stored.

    Args:
        store: holds the pieces.
        ledger: grants the bytes.
        home: the upload or batch that the body belongs to.
        charged_to: its name in the ledger.
        max_bytes: limit on the whole body.
    """

    def __init__(self, store: Store, ledger: Ledger, *, home: str, charged_to: str, max_bytes: int) -> None:
        self._store = store
        self._ledger = ledger
        self._key = names.body(home, UPLOADED)
        self._charged_to = charged_to
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._num_pieces = 0
        self.num_bytes = 0

    async def write(self, data: bytes) -> None:
        """Appends bytes.

        Raises:
            ApiError: it is too much for a file (413), or for the store (507).
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            message = f"file: is over the limit of {self._max_bytes} bytes"
            raise ApiError(413, message, param="file", code="too_large")
        self._buffer += data
        while len(self._buffer) >= PIECE_BYTES:
            await self._flush()

    async def close(self, ttl_s: int) -> None:
        """Writes the rest. From then on the body lives for `ttl_s`."""
        while self._buffer:
            await self._flush()
        await self._store.execute("EXPIRE", self._key, ttl_s)

    async def drop(self) -> None:
        """Removes what was written."""
        await self._store.execute("UNLINK", self._key)
        await self._ledger.release(self._charged_to)

    async def _flush(self) -> None:
        piece = bytes(self._buffer[:PIECE_BYTES])
        await self._ledger.charge(self._charged_to, self._num_pieces * PIECE_BYTES + len(piece), UPLOAD_S)
        await self._store.execute(*lua.call(_PUT, [self._key], [self._num_pieces, piece, UPLOAD_S]))
        self._num_pieces += 1
        del self._buffer[:PIECE_BYTES]


UPLOADED = "uploaded"
"""Name of an upload's body."""


_PLACE = re.compile(rb"[0-9]{1,18}")


class BodyLost(Exception):
    """A body, or a part of it, is gone."""


async def places_of(store: Store, key: str) -> list[int]:
    """Returns the numbers of a body's pieces, in order.

    Raises:
        BodyLost: something else is there.
        ConnectionLost, ServerRefused: Redis is away or refuses.
    """
    try:
        names_found: list[bytes] = await store.execute("HKEYS", key)
    except ServerRefused as error:
        if not error.is_junk:
            raise
        tell(key)
        raise BodyLost(key) from error
    return sorted(int(name) for name in names_found if _PLACE.fullmatch(name))


async def pieces(store: Store, key: str, num_bytes: int) -> AsyncIterator[bytes]:
    """Yields a body, a few pieces at a time.

    Raises:
        BodyLost: fewer than `num_bytes` are there.
        ConnectionLost, ServerRefused: Redis is away or refuses.
    """
    places = await places_of(store, key)
    for first in range(0, len(places), PIECES_A_READ):
        found: list[bytes | None] = await store.execute("HMGET", key, *places[first : first + PIECES_A_READ])
        if None in found:
            raise BodyLost(key)
        data = b"".join(piece for piece in found if piece is not None)
        num_bytes -= len(data)
        yield data
    if num_bytes > 0:
        raise BodyLost(key)

"""Ids of the rows of a job. They are the same in every run, so that no row is generated twice."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
from collections import Counter
from contextlib import suppress
from pathlib import Path

from penstock.protocol.wire import GenerateRequest, in_python

MIN_KEY_BYTES = 16
OF_THE_DELIVERY = frozenset(
    {
        "v", "id", "priority", "timeout_s", "keep_s", "exact", "tenant", "affinity", "cache_salt", "traceparent",
        "tracestate",
    }
)  # fmt: skip
"""Fields that decide when and for whom a reply is generated, not what it is."""

_ID_BYTES = 18


class RowIds:
    """Names the requests of a job, for the `ids` of `map`.

    An id is a keyed hash of the prompt, its options, the model, and how many equal rows came before it. Anyone who
    knows the id of a request can read its reply, so the key must be random and stay with the job. One instance counts
    the rows of one run.

    Args:
        key: at least 16 random bytes, such as `secrets.token_hex()`.
        model: which model the rows are for, such as `client.model_card().model`.

    Raises:
        TypeError, ValueError: the key is neither text nor bytes, or too short.
    """

    def __init__(self, key: str | bytes, *, model: str = "") -> None:
        if not isinstance(key, str | bytes):
            raise TypeError(f"key must be a str or bytes, not one of type {type(key).__name__}")
        if not isinstance(model, str):
            raise TypeError(f"model must be a str, not {in_python(model)}")
        secret = key.encode() if isinstance(key, str) else key
        if len(secret) < MIN_KEY_BYTES:
            raise ValueError(
                f"key has {len(secret)} bytes; at least {MIN_KEY_BYTES} random ones keep ids from being guessed"
            )
        self._key = hashlib.sha256(secret).digest()
        self._model = model
        self._rows: Counter[bytes] = Counter()

    @classmethod
    def from_file(cls, path: str | Path, *, model: str = "") -> RowIds:
        """Returns the ids of a job whose key is in a file, which is made with a random one if it is missing.

        Raises:
            OSError: it can't be read or made.
            ValueError: what it holds is too short.
        """
        place = Path(path)
        if not place.exists():
            beside = place.with_name(f"{place.name}.{secrets.token_hex(8)}")
            beside.touch(mode=0o600, exist_ok=False)
            beside.write_text(secrets.token_hex())
            with suppress(FileExistsError):  # another process was quicker
                os.link(beside, place)
            beside.unlink()
        return cls(place.read_bytes().strip(), model=model)

    def of(self, request: GenerateRequest) -> str:
        """Returns the id of the next row, whose request this is."""
        content = request.model_dump(mode="json", exclude_unset=True, exclude=set(OF_THE_DELIVERY))
        return self.of_content(json.dumps(content, sort_keys=True).encode())

    def of_content(self, content: bytes) -> str:
        """Returns the id of the next row, which has this content and perhaps makes no request."""
        digest = self._hash(content)
        self._rows[digest] += 1
        return self._id(f"{self._model}\0{self._rows[digest]}\0".encode() + digest)

    def after(self, request_id: str) -> str:
        """Returns the id of the next attempt at a row, whose reply under `request_id` is gone or has failed."""
        return self._id(b"after\0" + request_id.encode())

    def _hash(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, key=self._key, digest_size=_ID_BYTES).digest()

    def _id(self, content: bytes) -> str:
        return "m" + base64.urlsafe_b64encode(self._hash(content)).decode()


def check_ids(value: object) -> None:
    """Raises TypeError unless `map` takes the value as `ids`."""
    if not (value is None or isinstance(value, RowIds)):
        raise TypeError(f"ids must be RowIds, not {in_python(value)}")

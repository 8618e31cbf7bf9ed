"""The ids of tool calls: a function of request, choice and position, so that every worker gives the same."""

from __future__ import annotations

import hashlib

_ID_BYTES = 12


def call_id(request_id: str, choice: int, place: int) -> str:
    """Returns the id of a choice's tool call at `place`, the same wherever and however often the request runs."""
    text = f"{request_id}/{choice}/{place}".encode()
    return f"call_{hashlib.blake2b(text, digest_size=_ID_BYTES).hexdigest()}"

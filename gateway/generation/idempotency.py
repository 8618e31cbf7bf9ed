"""`Idempotency-Key`: a repeated request joins the earlier one.

The request's id depends only on the key, so any gateway finds the same reply, and the queue itself ensures that the
request exists once. What remains to check is that the repeated request is the same.
"""

from __future__ import annotations

import json
from hashlib import sha256

from starlette.requests import Request

from penstock.gateway.admission.request_ids import KEY_HEADER
from penstock.gateway.errors import ApiError
from penstock.gateway.http.events import Place
from penstock.gateway.http.resuming import PLACE_HEADER, sent_place
from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.producer import GenerateRequest
from penstock.protocol import lua

MAX_KEY_CHARS = 255
REMEMBERED_S = 86_400 + 3600
"""Longer than the queue remembers an id, counted from the last time that the request was sent."""

_OF_THE_RETRY = {"id", "traceparent", "tracestate"}
_REMEMBER = lua.load("penstock.gateway.generation", "remember")


def key_of(asked: Request) -> str | None:
    """Returns a request's key.

    Raises:
        ApiError: it is not a valid key.
    """
    key = asked.headers.get(KEY_HEADER)
    if key is not None and not (0 < len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable()):
        message = f"{KEY_HEADER} {key[:80]!r} is not 1 to {MAX_KEY_CHARS} printable characters of ASCII"
        raise ApiError(400, message, param=KEY_HEADER, code="invalid_idempotency_key")
    return key


async def check_same(
    store: Store, queue: str, request: GenerateRequest, num_requests: int, max_model_len: int | None
) -> None:
    """Checks that the request's id was not used for a different request before.

    Whether the answer is streamed or whole makes no difference; the number of requests to the queue (`num_requests`)
    does. A request up to the end of the context stays the same, however long the context is by now.

    Raises:
        ApiError: a different request had this id.
        ConnectionLost, ServerRefused: Redis is away or refuses.
    """
    asked_for = request.model_dump(mode="json", exclude=_OF_THE_RETRY, exclude_defaults=True)
    if request.max_tokens == max_model_len:
        asked_for["max_tokens"] = "to the end"
    digest = sha256(json.dumps([queue, asked_for, num_requests], sort_keys=True).encode()).hexdigest()
    key = names.fingerprint(request.id or "")
    first: bytes = await store.execute(*lua.call(_REMEMBER, [key], [digest, REMEMBERED_S]))
    if first != digest.encode():
        raise other_body()


def other_body() -> ApiError:
    """Returns the error for a key that was used before, for something else."""
    message = f"this {KEY_HEADER} was used before for a request with another body"
    return ApiError(422, message, param=KEY_HEADER, code="idempotency_key_reused")


def place_asked_for(asked: Request, key: str | None) -> Place:
    """Returns the event after which the client wants to continue.

    Raises:
        ApiError: the header is not an event's id, or it is unknown of which answer.
    """
    if key is None and PLACE_HEADER in asked.headers:
        message = f"{PLACE_HEADER} needs the {KEY_HEADER} that the answer was asked for with"
        raise ApiError(400, message, param=PLACE_HEADER, code="missing_idempotency_key")
    return sent_place(asked)

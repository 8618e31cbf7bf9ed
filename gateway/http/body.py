"""Bodies of requests, within limits."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from penstock.gateway.errors import ApiError
from penstock.producer.wire.values import check_json


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError (413) as soon as there is more."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and len(announced) < 20 and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The object that a body spells.

    Raises:
        ApiError: it is too large (413), or spells none (400).
    """
    body = await read_body(request, max_bytes)
    try:
        value = check_json(json.loads(body))
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}"[:300], code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {type(value).__name__}, not an object", code="invalid_json")
    return value


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is over the limit of {max_bytes} bytes", code="too_large")

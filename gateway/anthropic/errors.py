"""Errors in the form of Anthropic's API: https://platform.claude.com/docs/en/api/errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.gateway.errors import ApiError

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns an error's body, which is also the data of an event that ends a stream."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {} if error.details is None else {"details": error.details}
    return {"type": "error", "error": {"type": kind, "message": error.message, **details}, "request_id": request_id}

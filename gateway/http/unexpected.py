"""Unexpected errors: their location is logged, and not their text, which may quote a prompt."""

from __future__ import annotations

from typing import Any

import structlog

from penstock.gateway.errors import ApiError

_log = structlog.get_logger(__name__)

_NUM_PLACES = 12


def log_unexpected(event: str, error: Exception, **fields: Any) -> None:
    places = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{code.co_filename}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    _log.error(event, **fields, error=type(error).__name__, places=places[-_NUM_PLACES:])


def internal_error() -> ApiError:
    """Returns the error for the client."""
    return ApiError(500, "this went wrong inside the gateway", type="server_error", code="internal_error")

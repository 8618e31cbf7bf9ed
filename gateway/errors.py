"""HTTP errors: one table from our exceptions to statuses, and OpenAI's error body."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

import structlog
from pydantic import ValidationError

from penstock.gateway.damage import tell
from penstock.producer import (
    CallFailed,
    CallTimedOut,
    ConnectionLost,
    NotDurable,
    PenstockError,
    QueueFull,
    ReplyCorrupt,
    ReplyGone,
    ReplyTimeout,
    RequestFailed,
    RequestRefused,
    ServerRefused,
    UnknownRequest,
)
from penstock.protocol.redis.faults import is_refused
from penstock.protocol.wire.values import explain, place_of

RETRY_AFTER_S = 1

MAX_MESSAGE_CHARS = 2500
"""A worker's messages have at most 2000; other writers of replies may send longer ones."""

MAX_CODE_CHARS = 64

_FIELD = re.compile(r"[\w.\[\]]{1,200}")

_log = structlog.get_logger(__name__)


class ApiError(Exception):
    """An error to send as the answer.

    Attributes:
        status: the HTTP status.
        message: for people; it names the wrong value and holds no prompt. It is cut to `MAX_MESSAGE_CHARS`.
        type: OpenAI's class of errors.
        param: the field that is wrong, if any.
        code: for programs; it is cut to `MAX_CODE_CHARS`.
        retry_after_s: when a retry may help; None: it won't.
        details: more for programs, in the form of an API that has a place for it.
        ends_reply: whether the reply itself ended with this error, for all its readers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",  # noqa: A002  the name in OpenAI's API
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        details: Mapping[str, Any] | None = None,
        ends_reply: bool = False,
    ) -> None:
        self.message = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[: MAX_MESSAGE_CHARS - 1]}…"
        super().__init__(self.message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code and code[:MAX_CODE_CHARS]
        self.retry_after_s = retry_after_s
        self.details = details
        self.ends_reply = ends_reply

    @property
    def may_be_retried(self) -> bool:
        return self.retry_after_s is not None

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer. OpenAI's clients decide by `x-should-retry`."""
        if self.retry_after_s is None:
            return {"x-should-retry": "false"}
        return {"retry-after": str(self.retry_after_s), "x-should-retry": "true"}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def _refused(error: RequestRefused) -> ApiError:
    if error.code == "too_long":  # clients know it by the code, or by these words
        message = f"this model's maximum context length is exceeded: {error.message}"
        return ApiError(400, message, code="context_length_exceeded", ends_reply=True)
    status = 413 if error.code == "too_large" else 400
    return ApiError(status, error.message, param=_field_of(error.message), code=error.code, ends_reply=True)


def _field_of(message: str) -> str | None:
    """Returns the field that a refusal's message begins with, as in `temperature: Input should be ...`."""
    name, colon, _ = message.partition(": ")
    return name if colon and _FIELD.fullmatch(name) else None


def unavailable(message: str) -> ApiError:
    """Returns an error about something that is away or busy for a while."""
    return ApiError(503, message, type="server_error", code="unavailable", retry_after_s=RETRY_AFTER_S)


def _lost(_: ConnectionLost) -> ApiError:
    """Hides the address of Redis and its words, which are for the operator: `RedisHealth` logs them."""
    return unavailable("the gateway has no connection to its queue now; try again")


def _redis_refused(error: ServerRefused) -> ApiError:
    """Returns a 503 while people may fix a password or a permission. A refusal of this request alone is a 500: no retry
    helps.
    """
    if error.is_junk:
        return _junk(error)
    if error.is_passing or is_refused(error):
        return unavailable("the gateway's queue takes nothing now; try again")
    _log.error("redis_refused", error=str(error))
    message = "the gateway's queue has refused a command; the gateway's log says why"
    return ApiError(500, message, type="server_error", code="internal_error")


def _junk(error: ServerRefused) -> ApiError:
    """Workers and gateways set junk aside where they can; the rest is for people."""
    tell(str(error))
    return unavailable("what this needs is damaged, and the gateway's log says where; try again")


def _corrupt(error: ReplyCorrupt) -> ApiError:
    return ApiError(409, str(error), type="conflict_error", code="reply_damaged")


def _failed(error: RequestFailed) -> ApiError:
    if error.code == "arithmetic_gone":  # the client asked for that, by `exact`
        return ApiError(503, error.message, type="server_error", code=error.code, ends_reply=True)
    return _internal(error)


def _internal(error: PenstockError) -> ApiError:
    is_end = isinstance(error, RequestFailed)
    return ApiError(500, str(error), type="server_error", code="internal_error", ends_reply=is_end)


def _full(error: QueueFull) -> ApiError:
    retry_after_s = RETRY_AFTER_S if error.retry_after_s is None else max(RETRY_AFTER_S, ceil(error.retry_after_s))
    return ApiError(429, str(error), type="rate_limit_error", code="queue_full", retry_after_s=retry_after_s)


_TABLE: Mapping[type[PenstockError], Callable[[Any], ApiError]] = {
    RequestRefused: _refused,
    QueueFull: _full,
    UnknownRequest: lambda error: ApiError(404, str(error), code="not_found"),
    ReplyGone: lambda error: ApiError(409, str(error), type="conflict_error", code="reply_expired"),
    ReplyTimeout: lambda error: ApiError(408, str(error), type="timeout_error", code="timeout"),
    CallTimedOut: lambda error: unavailable(str(error)),
    ConnectionLost: _lost,
    NotDurable: lambda error: unavailable(str(error)),
    ServerRefused: _redis_refused,
    RequestFailed: _failed,
    CallFailed: _internal,
    ReplyCorrupt: _corrupt,
}


def api_error(error: PenstockError) -> ApiError:
    """Returns what a client learns about `error`. The rest is logged."""
    return next(_TABLE[kind](error) for kind in type(error).__mro__ if kind in _TABLE)


def ended_early(finish_reason: str) -> ApiError:
    """Returns the error for a reply that ended `cancelled` or `expired`: OpenAI's API has no finish reason for it."""
    if finish_reason == "expired":
        message = "the request expired before it was finished"
        return ApiError(408, message, type="timeout_error", code="expired", ends_reply=True)
    return ApiError(409, "the request was cancelled", type="conflict_error", code="cancelled", ends_reply=True)


def overdue(timeout_s: float) -> ApiError:
    """Returns the error for a request whose time is over, although no worker has ended it: it expires when one takes
    it.
    """
    message = f"the request's timeout_s of {timeout_s:g} s is over, and no worker has ended it"
    return ApiError(408, message, type="timeout_error", code="expired")


def invalid_value(error: ValidationError) -> ApiError:
    """Returns the error for a body with wrong, missing or unknown values; `param` is the first of them."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, message = first["type"], explain(error).removeprefix("request: ")
    code = "missing_required_parameter" if kind == "missing" else "invalid_value"
    if kind.endswith("_type"):
        code = "invalid_type"
    elif first["msg"].startswith("Value error, unknown field"):
        code = "unknown_parameter"
    return ApiError(400, message, param=place_of(first["loc"]) or _field_of(message), code=code)

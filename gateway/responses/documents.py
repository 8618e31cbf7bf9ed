"""The body of a response, before its end and after it."""

from __future__ import annotations

from typing import Literal

from penstock.gateway.common.documents import Document
from penstock.gateway.errors import ApiError
from penstock.gateway.responses.output.answer import ResponseOutput
from penstock.gateway.responses.stored import StoredResponse
from penstock.producer import FinishReason, Reply, Usage

_ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]

_STATUSES: dict[FinishReason, _ResponseStatus] = {
    "stop": "completed",
    "tool_calls": "completed",
    "length": "incomplete",
    "cancelled": "cancelled",
}


def pending(response: StoredResponse, status: _ResponseStatus) -> Document:
    """Returns the body of a response that has not ended."""
    return _document(response, status)


def ended(response: StoredResponse, output: ResponseOutput, reply: Reply) -> Document:
    """Returns the body of a response whose reply is not an error. `output` is closed."""
    status = _STATUSES[reply.finish_reason]
    return _document(
        response,
        status,
        output=output.items,
        usage=_usage(reply.usage),
        incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
        completed_at=_ended_at(response, reply) if status == "completed" else None,
    )


def failed(response: StoredResponse, output: ResponseOutput, error: ApiError) -> Document:
    """Returns the body of a response that ended with an error, with its output before that."""
    code = "invalid_prompt" if error.status in (400, 413) else "server_error"
    return _document(response, "failed", output=output.items, error={"code": code, "message": error.message})


def _document(response: StoredResponse, status: _ResponseStatus, **more: object) -> Document:
    return {
        "id": response.id,
        "object": "response",
        "created_at": response.created_at,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "completed_at": None,
        **response.asked,
        **more,
    }


def _ended_at(response: StoredResponse, reply: Reply) -> int:
    return (response.created_at or 0) + (reply.timings.total_ms or 0) // 1000


def _usage(counts: Usage) -> Document:
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }

"""A batch's body, and the lines of its output files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from penstock.gateway.batches.stored import TIMES, BatchProgress, StoredBatch
from penstock.gateway.common.documents import Document
from penstock.gateway.errors import ApiError
from penstock.producer import Usage


def batch_document(batch: StoredBatch, progress: BatchProgress) -> Document:
    """Returns a batch in the form of OpenAI's API."""
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": progress.fields.get("model"),
        "errors": progress.document("errors"),
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": progress.status,
        "output_file_id": progress.fields.get("output_file_id"),
        "error_file_id": progress.fields.get("error_file_id"),
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{name: progress.number(name) or None for name in TIMES},
        "request_counts": {name: progress.number(name) for name in ("total", "completed", "failed")},
        "usage": _usage(progress),
        "metadata": batch.metadata,
    }


def token_counts(usages: Sequence[Usage]) -> Mapping[str, int]:
    """Returns what a line's replies add to the batch's token counts."""
    return {
        "input_tokens": sum(usage.prompt_tokens for usage in usages),
        "cached_tokens": sum(usage.cached_tokens for usage in usages),
        "output_tokens": sum(usage.completion_tokens for usage in usages),
        "reasoning_tokens": sum(usage.reasoning_tokens for usage in usages),
    }


def _usage(progress: BatchProgress) -> Document:
    """Returns the usage of the lines answered so far."""
    num_input, num_output = progress.number("input_tokens"), progress.number("output_tokens")
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": progress.number("cached_tokens")},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": progress.number("reasoning_tokens")},
        "total_tokens": num_input + num_output,
    }


def errors_document(errors: list[Document]) -> str:
    return json.dumps({"object": "list", "data": errors}, separators=(",", ":"))


def error_of(error: ApiError, line: int | None = None) -> Document:
    """Returns an error of a batch as a whole."""
    return {"code": error.code, "line": line, "message": error.message, "param": error.param}


def answered(request_id: str, custom_id: str, status: int, body: Document) -> bytes:
    """Returns the result of a line that was answered, by a worker or with a refusal."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(request_id, custom_id, response=response, error=None)


def unanswered(request_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Returns the result of a line that had no answer when the batch ended."""
    return _line(request_id, custom_id, response=None, error={"code": code, "message": message})


def _line(request_id: str, custom_id: str, **more: Document | None) -> bytes:
    document = {"id": f"batch_req_{request_id}", "custom_id": custom_id, **more}
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"

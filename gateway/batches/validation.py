"""Validates a batch's input before any of its lines runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from penstock.gateway.batches.documents import error_of
from penstock.gateway.batches.lines import BatchLine, RawLine
from penstock.gateway.common.documents import Document
from penstock.gateway.directory import Directory
from penstock.gateway.errors import ApiError

MAX_LINES = 50_000
MAX_ERRORS = 100


@dataclass(slots=True)
class Findings:
    """Findings about an input."""

    num_lines: int = 0
    queues: dict[str, str] = field(default_factory=dict)  # by the model's name in the lines
    errors: list[Document] = field(default_factory=list)

    @property
    def model(self) -> str | None:
        """The model of all lines; None: they differ."""
        return next(iter(self.queues)) if len(self.queues) == 1 else None


async def validate(
    lines: AsyncIterator[RawLine], *, endpoint: str, max_line_bytes: int, directory: Directory
) -> Findings:
    """Checks all lines, or until there are too many errors.

    Args:
        lines: the input's.
        endpoint: the endpoint of all lines.
        max_line_bytes: limit on a line.
        directory: the queues that the batch's owner may use.

    Raises:
        ApiError: nobody serves one of the models now (503).
        ConnectionLost, ServerRefused: Redis is away or refuses.
    """
    findings = Findings()
    known: dict[str, int] = {}  # custom_id to its line
    refused: dict[str, ApiError] = {}  # by model
    async for raw in lines:
        findings.num_lines += 1
        try:
            line = await raw.parsed(endpoint, max_line_bytes)
            _check_unique(line, known)
            await _find_queue(line.model, directory, findings.queues, refused)
        except ApiError as error:
            if error.retry_after_s is not None:
                raise
            findings.errors.append(error_of(error, raw.place))
        if len(findings.errors) >= MAX_ERRORS or findings.num_lines > MAX_LINES:
            break
    if findings.num_lines > MAX_LINES:
        too_many = ApiError(400, f"the file has more than {MAX_LINES} requests", code="too_many_requests")
        findings.errors.append(error_of(too_many))
    if not findings.num_lines:
        findings.errors.append(error_of(ApiError(400, "the file has no requests", code="empty_file")))
    return findings


def _check_unique(line: BatchLine, known: dict[str, int]) -> None:
    first = known.setdefault(line.custom_id, line.place)
    if first != line.place:
        message = f"custom_id: {line.custom_id[:80]!r} is that of line {first} too"
        raise ApiError(400, message, param="custom_id", code="duplicate_custom_id")


async def _find_queue(model: str, directory: Directory, queues: dict[str, str], refused: dict[str, ApiError]) -> None:
    """Finds a model's queue, once per model."""
    if model in refused:
        raise refused[model]
    if model not in queues:
        try:
            queues[model] = await directory.queue_of(model)
        except ApiError as error:
            refused[model] = error
            raise

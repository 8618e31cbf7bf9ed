"""How a request's end looks: to its reader, to the logs and metrics, and on the dead-letter stream."""

from __future__ import annotations

from penstock.engine.request import FinishReason
from penstock.producer.pipeline import Command
from penstock.producer.wire import EndEntry
from penstock.worker import scripts
from penstock.worker.config import WorkerConfig
from penstock.worker.live import LiveRequest
from penstock.worker.metrics import Metrics
from penstock.worker.scripts import Claim

MAX_MESSAGE_CHARS = 2000  # of an error, which may quote what the client sent


def end_entry(live: LiveRequest, reason: FinishReason) -> EndEntry:
    """The end as of now, with everything that is pending counted in."""
    code, message = live.error or (None, None)
    reasons = tuple(choice.finish_reason or reason for choice in live.choices)
    return EndEntry(
        finish_reason=reason,
        finish_reasons=reasons if len(reasons) > 1 else None,
        prompt_tokens=live.prompt_tokens,
        cached_tokens=live.cached_tokens,
        completion_tokens=live.completion_tokens,
        queued_ms=max(0, live.claim.first_server_ms - live.enqueued_ms),
        ttft_ms=None if live.first_token_ms is None else max(0, live.first_token_ms - live.enqueued_ms),
        total_ms=max(0, live.clock.now_ms() - live.enqueued_ms),
        code=code,
        message=None if message is None else printable(message),
    )


def observe_end(metrics: Metrics, live: LiveRequest, end: EndEntry) -> None:
    """Counts a finished request and writes its one log line."""
    metrics.requests.labels(finish_reason=end.finish_reason).inc()
    metrics.queue_seconds.observe((end.queued_ms or 0) / 1000)
    metrics.request_seconds.observe((end.total_ms or 0) / 1000)
    if end.ttft_ms is not None:
        metrics.first_token_seconds.observe(end.ttft_ms / 1000)
        if end.completion_tokens > 1:
            spent_ms = (end.total_ms or 0) - end.ttft_ms
            metrics.token_seconds.observe(spent_ms / 1000 / (end.completion_tokens - 1))
    live.log.info(
        "request_ended",
        epoch=live.claim.epoch,
        # The message of an error may quote the request, and is for the client alone.
        **end.model_dump(exclude={"type", "message"}, exclude_none=True),
    )


def dead_letter(live: LiveRequest, code: str, message: str, config: WorkerConfig) -> Command:
    """Moves the queue entry of `live` to the dead-letter stream, with why and with its history."""
    return dead_letter_of(live.id, live.entry_id, live.fields, code, message, config, live.claim)


def dead_letter_of(
    request_id: str,
    entry_id: str,
    fields: dict[bytes, bytes],
    code: str,
    message: str,
    config: WorkerConfig,
    claim: Claim | None = None,
) -> Command:
    """As `dead_letter`. The entry's own fields are kept as `field:<name>`, unless they are over the size limit."""
    letter: list[str | bytes] = ["id", request_id, "entry", entry_id, "code", code, "message", printable(message),
                                 "worker", config.name]  # fmt: skip
    if claim is not None:
        for name in ("attempts", "crashes", "strikes", "handbacks"):
            letter += (name, str(getattr(claim, name)))
    if sum(len(name) + len(value) for name, value in fields.items()) <= config.max_body_bytes:
        for name_bytes, value in fields.items():
            letter += (b"field:" + name_bytes, value)
    return scripts.bury(
        config.queue, worker=config.name, entry_id=entry_id, keep=config.max_dead_entries, fields=letter
    )


def printable(message: str) -> str:
    """A message that Redis takes: lone surrogates, which JSON may hold and UTF-8 may not, are spelled out."""
    return message[:MAX_MESSAGE_CHARS].encode(errors="backslashreplace").decode()

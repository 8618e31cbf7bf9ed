"""Reports the end of a request: to its reader, in the logs and metrics, and on the stream of dead letters."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from penstock.engine.request import FinishReason
from penstock.protocol import keys, scripts
from penstock.protocol.redis.pipeline import Command
from penstock.protocol.scripts import Claim, LetterLimits
from penstock.protocol.wire import MAX_FIELDS, EndEntry, WireError, encode_reply, entry_size, parse_request
from penstock.worker.config import WorkerConfig
from penstock.worker.metrics import WorkerMetrics, band_of
from penstock.worker.publish.chunks import draft_fields, stop_fields
from penstock.worker.publish.writes import AsideWrite, Burial, RefreshWrite
from penstock.worker.run.requests import Asked, LiveRequest

_log = structlog.get_logger(__name__)

MAX_MESSAGE_CHARS = 2000  # of an error, which may quote the client
NOT_OURS = "the request's keys in Redis hold what no worker writes there"
"""Message for the client; the log has Redis's words."""

_NAMED_LOSSES = 8
"""Limit on the requests that one line names."""

MALFORMED_SHARE = 10  # malformed entries get a tenth of what dead letters may take

_MALFORMED_CODES = ("invalid_request", "too_large")  # in a dead letter; as the code of an end they may mean a limit


def end_entry(live: LiveRequest) -> EndEntry:
    """Makes the end of a request that has ended, counting everything that is still pending."""
    reason: FinishReason = live.finish_reason or "error"
    code, message = live.error or (None, None)
    reasons = tuple(choice.finish_reason or reason for choice in live.choices)
    return EndEntry(
        finish_reason=reason,
        finish_reasons=reasons if len(reasons) > 1 else None,
        **(stop_fields(live.choices[0]) if len(reasons) == 1 and reason == reasons[0] else {}),
        prompt_tokens=live.prompt_tokens,
        cached_tokens=live.cached_tokens,
        completion_tokens=live.completion_tokens,
        reasoning_tokens=live.reasoning_tokens,
        **draft_fields(live.choices),
        queued_ms=max(0, live.claim.first_server_ms - live.enqueued_ms),
        ttft_ms=None if live.first_token_ms is None else max(0, live.first_token_ms - live.enqueued_ms),
        total_ms=max(0, live.clock.now_ms() - live.enqueued_ms),
        ignored=live.ignored or None,
        arithmetic=live.claim.arithmetic or None,
        exact=None if live.claim.is_exact else 0,
        code=code,
        message=None if message is None else printable(message),
    )


def kept_ms(asked: Asked, config: WorkerConfig) -> int:
    """Returns how long the reply to `asked` is kept after its end.

    A request over the limit, or one that cannot be read, is refused: its reply is kept for the default time.
    """
    kept_s = None if isinstance(asked, WireError) else asked.keep_s
    if kept_s is None or kept_s > config.max_keep_s:
        kept_s = config.reply_ttl_after_end_s
    return round(kept_s * 1000)


def unclaimed_end(request_id: str, asked: Asked, message: str, config: WorkerConfig) -> Command:
    """Returns the command that ends the reply to a request that can't be claimed, as far as it can be written."""
    end = EndEntry(finish_reason="error", code="reply_unwritable", message=printable(message))
    fields = [part for item in encode_reply(end).items() for part in item]
    return scripts.end_unclaimed(config.queue, request_id, ttl_ms=kept_ms(asked, config), fields=fields)


def observe_end(metrics: WorkerMetrics, live: LiveRequest, end: EndEntry) -> None:
    """Counts a finished request, writes its one log line, and ends its spans."""
    live.trace.ended(end)
    metrics.requests_by_reason[end.finish_reason].inc()
    metrics.count_error(end.code)
    _observe_tokens(metrics, end)
    priority = 0 if isinstance(live.asked, WireError) else live.asked.priority
    metrics.queue_seconds_by_band[band_of(priority)].observe((end.queued_ms or 0) / 1000)
    metrics.request_seconds.observe((end.total_ms or 0) / 1000)
    if end.ttft_ms is not None:
        metrics.first_token_seconds.observe(end.ttft_ms / 1000)
        if end.completion_tokens > 1:
            spent_ms = (end.total_ms or 0) - end.ttft_ms
            metrics.token_seconds.observe(spent_ms / 1000 / (end.completion_tokens - 1))
    live.log.info(
        "request_ended",
        epoch=live.claim.epoch,
        # An error's message may quote the request, and is for the client alone.
        **end.model_dump(exclude={"type", "message"}, exclude_none=True),
    )


def _observe_tokens(metrics: WorkerMetrics, end: EndEntry) -> None:
    """Counts a reply's usage, so that sums over workers equal those over replies."""
    metrics.prompt_tokens.inc(end.prompt_tokens)
    metrics.cached_tokens.inc(min(end.cached_tokens, end.prompt_tokens))
    metrics.generation_tokens.inc(end.completion_tokens)
    metrics.prompt_lengths.observe(end.prompt_tokens)
    metrics.reply_lengths.observe(end.completion_tokens)


def observe_letter(metrics: WorkerMetrics, letter: Burial) -> None:
    metrics.dead_letters.labels(kind="malformed" if letter.is_malformed else "request").inc()


def observe_loss(metrics: WorkerMetrics, live: LiveRequest, why: str) -> None:
    """Records that a request went to another owner, or that its reply is gone."""
    count_loss(metrics, live, why)
    log_losses([(live, why)])


def count_loss(metrics: WorkerMetrics, live: LiveRequest, why: str) -> None:
    live.trace.lost(why)
    metrics.dropped.labels(reason=why).inc()


def log_losses(losses: Sequence[tuple[LiveRequest, str]]) -> None:
    """Writes one line for each reason: a worker that thaws loses all that it had at once."""
    for why in dict.fromkeys(why for _, why in losses):
        lost = [live for live, reason in losses if reason == why]
        more = {} if len(lost) == 1 else {"count": len(lost), "others": [live.id for live in lost[1:_NAMED_LOSSES]]}
        lost[0].log.warning("request_dropped", reason=why, epoch=lost[0].claim.epoch, **more)


def observe_refusal(metrics: WorkerMetrics, write: Burial | AsideWrite | RefreshWrite, error: Exception) -> None:
    """Records that Redis permanently refuses a write that nobody waits for."""
    if isinstance(write, Burial):
        metrics.lost_dead_letters.inc()
        what = {"request_id": write.request_id, "entry": write.entry_id, "code": write.code}
        _log.error("dead_letter_lost", **what, error=str(error))
    else:
        _log.error("write_refused", command=write.command[0], error=str(error))


def dead_letter(live: LiveRequest, code: str, message: str, config: WorkerConfig) -> Burial:
    """Moves the queue entry of `live` to the dead letters, with the reason and its history."""
    return dead_letter_of(live.id, live.entry_id, live.fields, code, message, config, live.claim)


def dead_letter_of(
    request_id: str,
    entry_id: str,
    fields: dict[bytes, bytes],
    code: str,
    message: str,
    config: WorkerConfig,
    claim: Claim | None = None,
) -> Burial:
    """Makes a dead letter. The entry's own fields are kept as `field:<name>`, unless they are over a limit."""
    is_malformed = code in _MALFORMED_CODES or not _is_request(entry_id, fields, config)
    limits = _limits(config, share=MALFORMED_SHARE if is_malformed else 1)
    letter: list[str | bytes] = ["id", request_id, "entry", entry_id, "code", code, "message", printable(message),
                                 "worker", config.name]  # fmt: skip
    if claim is not None:
        for name in ("attempts", "crashes", "strikes", "handbacks"):
            letter += (name, str(getattr(claim, name)))
    if len(fields) <= MAX_FIELDS and entry_size(fields) <= min(config.max_body_bytes, limits.max_bytes):
        for name_bytes, value in fields.items():
            letter += (b"field:" + name_bytes, value)
    stream = keys.malformed(config.queue) if is_malformed else keys.dead(config.queue)
    command = scripts.bury(
        config.queue,
        worker=config.name,
        request_id=request_id,
        entry_id=entry_id,
        letters=stream,
        limits=limits,
        fields=letter,
    )
    return Burial(request_id, entry_id, code, is_malformed, command)


def _is_request(entry_id: str, fields: dict[bytes, bytes], config: WorkerConfig) -> bool:
    """Checks whether the entry is a readable request. Codes that leave it open are rare enough to read it again."""
    try:
        parse_request(entry_id, fields, max_body_bytes=config.max_body_bytes)
    except WireError:
        return False
    return True


def _limits(config: WorkerConfig, *, share: int) -> LetterLimits:
    return LetterLimits(
        max_entries=max(1, config.max_dead_entries // share),
        max_bytes=max(1, config.max_dead_bytes // share),
        ttl_ms=max(1, round(config.dead_ttl_s * 1000)),
    )


def printable(message: str) -> str:
    """Makes a message that Redis accepts: spells out lone surrogates, which JSON may contain and UTF-8 may not."""
    return message[:MAX_MESSAGE_CHARS].encode(errors="backslashreplace").decode()

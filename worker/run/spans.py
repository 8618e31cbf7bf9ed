"""The spans of a worker's requests, exported early, as the worker may be killed at any moment.

    request QUEUE      CONSUMER, from the enqueue to the end, only for a request that came without a trace
      wait QUEUE       from the enqueue to the first claim
      claim QUEUE      CLIENT, until the request is this worker's
      process QUEUE    CONSUMER, from the claim to the end, linked to the claim before it
        prepare        until the engine has the request: journal, template, tokens, grammar
        prefill        until the first token of this claim
        decode         until the end

A span is exported when it ends, so all but the outermost are short. The id of a `process` span depends only on the
request and the claim's epoch. So the next worker to claim the request knows the id, and ends the span in place of one
that died. The spans that a killed worker has exported thus get their parent, and nothing is kept in Redis for that. If
a request brings no trace, ids are derived from its queue, its id and its entry: all workers derive the same.

Times are by the server's clock, as in the reply's end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeAlias

from opentelemetry.context import Context
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv._incubating.attributes import messaging_attributes as messaging
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, TraceFlags, TracerProvider, get_current_span

from penstock.protocol import keys
from penstock.protocol.scripts import EarlierClaim
from penstock.protocol.telemetry import names
from penstock.protocol.telemetry.recorder import Attributes, SpanRecorder, parent_of, within
from penstock.protocol.telemetry.sdk import chosen_ids
from penstock.protocol.wire import EndEntry, WireError
from penstock.worker.run.requests import LiveRequest
from penstock.worker.run.tracing import UNTRACED, ClaimTrace

CLAIM_LOST = "claim_lost"
"""Error of a claim whose worker died, froze or lost the request; the next claim reports it."""

HANDED_BACK = "handed_back"
TAKEOVER = "takeover"

Values: TypeAlias = dict[str, str | bool | int | float | Sequence[str]]


class RequestSpans:
    """Makes the spans of one worker.

    Args:
        provider: exports them.
        queue: served by the worker.
        worker: its name.
        model: the model's name.
    """

    def __init__(self, provider: TracerProvider, queue: str, worker: str, model: str) -> None:
        self.recorder = SpanRecorder(provider)
        self._queue = queue
        self._worker = worker
        self._model = model

    def begin(self, live: LiveRequest, taken_s: float) -> ClaimTrace:
        """Begins the trace of a request that was just claimed; its entry was taken at `taken_s` (monotonic)."""
        with self.recorder.harmless:
            return self._begin(live, taken_s)
        return UNTRACED

    def _begin(self, live: LiveRequest, taken_s: float) -> ClaimTrace:
        root = None
        parent = None if isinstance(live.asked, WireError) else parent_of(live.asked)
        if parent is None:
            root = self._root(live)
            parent = within(root)
        claimed_ns = live.claim.server_ms * 10**6
        with chosen_ids(_attempt_id(live, live.claim.epoch)):
            process = self.recorder.start(
                f"process {self._queue}",
                SpanKind.CONSUMER,
                parent,
                self._claim_values(live, self._worker, live.claim.attempts),
                start_ns=claimed_ns,
                links=_links(live, parent),
            )
        if not process.is_recording():
            return UNTRACED
        self._tell_before(live, parent, taken_s)
        return RequestTrace(self.recorder, live, root, process, claimed_ns)

    def _root(self, live: LiveRequest) -> Span:
        """Begins the root span of a trace that no client began. It ends with the request, at any worker."""
        digest = _digest("root", live.queue, live.id, live.entry_id, size=24)
        said = {**self._message_values(live, "request", None), **self._request_values(live)}
        with chosen_ids(int.from_bytes(digest[16:], "big"), int.from_bytes(digest[:16], "big")):
            return self.recorder.start(
                f"request {self._queue}", SpanKind.CONSUMER, Context(), said, start_ns=live.enqueued_ms * 10**6
            )

    def _tell_before(self, live: LiveRequest, parent: Context, taken_s: float) -> None:
        """Records the spans that are over: the wait, this claim, and the one before it if its worker no longer can."""
        claim, record = live.claim, self.recorder
        claimed_ns = claim.server_ms * 10**6
        if claim.attempts == 1:
            said = self._message_values(live, "wait", None)
            wait = record.start(
                f"wait {self._queue}", SpanKind.INTERNAL, parent, said, start_ns=live.enqueued_ms * 10**6
            )
            record.end(wait, end_ns=claimed_ns)
        taking_ns = round((live.clock.monotonic_s - taken_s) * 10**9)
        said = self._message_values(live, "claim", "receive")
        taking = record.start(f"claim {self._queue}", SpanKind.CLIENT, parent, said, start_ns=claimed_ns - taking_ns)
        record.end(taking, end_ns=claimed_ns)
        if claim.earlier is not None and claim.earlier.was_held:
            self._tell_lost(live, claim.earlier, parent)

    def _tell_lost(self, live: LiveRequest, earlier: EarlierClaim, parent: Context) -> None:
        claimed_ns = live.claim.server_ms * 10**6
        with chosen_ids(_attempt_id(live, earlier.epoch)):
            lost = self.recorder.start(
                f"process {self._queue}",
                SpanKind.CONSUMER,
                parent,
                self._claim_values(live, earlier.worker, live.claim.attempts - 1),
                # An epoch is the server's clock in microseconds, unless that was behind; truncated to milliseconds.
                start_ns=min(max(earlier.epoch // 1000, live.enqueued_ms), live.claim.server_ms) * 10**6,
            )
        self.recorder.end(lost, error=CLAIM_LOST, end_ns=claimed_ns)

    def _claim_values(self, live: LiveRequest, worker: str, attempt: int) -> Values:
        said = {
            **self._message_values(live, "process", "process"),
            **self._request_values(live),
            names.ATTEMPT: attempt,
        }
        return {**said, messaging.MESSAGING_CLIENT_ID: worker}

    def _message_values(self, live: LiveRequest, operation: str, kind: str | None) -> Values:
        return {
            **names.message_attributes(self._queue, operation, kind, live.id),
            messaging.MESSAGING_CONSUMER_GROUP_NAME: keys.GROUP,
            messaging.MESSAGING_CLIENT_ID: self._worker,
            messaging.MESSAGING_MESSAGE_ID: live.entry_id,
            messaging.MESSAGING_MESSAGE_ENVELOPE_SIZE: live.entry_bytes,
        }

    def _request_values(self, live: LiveRequest) -> Values:
        if isinstance(live.asked, WireError):
            return {}
        return {**names.request_attributes(live.asked, self._model), gen_ai.GEN_AI_RESPONSE_MODEL: self._model}


class RequestTrace(ClaimTrace):
    """Traces one claim of a request."""

    __slots__ = ("_live", "_phase", "_process", "_recorder", "_root")

    def __init__(
        self, recorder: SpanRecorder, live: LiveRequest, root: Span | None, process: Span, claimed_ns: int
    ) -> None:
        self._recorder = recorder
        self._live = live
        self._root = root
        self._process = process
        self._phase: Span = self._begin_phase("prepare", claimed_ns)  # the current phase

    def started(self, prompt_tokens: int, resumed_tokens: int) -> None:
        now_ns = self._now_ns()
        said: Values = {gen_ai.GEN_AI_USAGE_INPUT_TOKENS: prompt_tokens}
        if resumed_tokens:
            said[names.RESUMED_TOKENS] = resumed_tokens
        self._end_phase(now_ns, said)
        self._phase = self._begin_phase("prefill", now_ns, said)

    def first_token(self, cached_tokens: int) -> None:
        now_ns = self._now_ns()
        said: Values = {gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: cached_tokens}
        self._end_phase(now_ns, said)
        self._phase = self._begin_phase("decode", now_ns)

    def ended(self, end: EndEntry) -> None:
        now_ns = self._now_ns()
        said = names.end_attributes(
            self._live.id,
            end.finish_reasons or (end.finish_reason,),
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            completion_tokens=end.completion_tokens,
            reasoning_tokens=end.reasoning_tokens,
        )
        self._end_phase(now_ns, {gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: end.completion_tokens})
        self._end_all(now_ns, said, end.code)

    def handed_back(self, completion_tokens: int) -> None:
        now_ns = self._now_ns()
        said: Values = {gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: completion_tokens, names.OUTCOME: HANDED_BACK}
        self._end_phase(now_ns, said)
        self._recorder.end(self._process, said, end_ns=now_ns)

    def lost(self, why: str) -> None:
        """Ends the current phase. The next claim ends `process`, if there will be one."""
        now_ns = self._now_ns()
        self._end_phase(now_ns, {names.OUTCOME: why})
        if why == "unwritable":
            self._end_all(now_ns, {names.OUTCOME: why}, "reply_unwritable")

    def _now_ns(self) -> int:
        clock = self._live.clock
        return clock.server_ms * 10**6 + round((time.monotonic() - clock.monotonic_s) * 10**9)

    def _begin_phase(self, name: str, start_ns: int, said: Values | None = None) -> Span:
        known = {names.REQUEST_ID: self._live.id, **(said or {})}
        return self._recorder.start(name, SpanKind.INTERNAL, within(self._process), known, start_ns=start_ns)

    def _end_all(self, end_ns: int, said: Attributes, error: str | None) -> None:
        for span in (self._process, self._root):
            if span is not None:
                self._recorder.end(span, said, error=error, end_ns=end_ns)

    def _end_phase(self, end_ns: int, said: Values) -> None:
        self._recorder.end(self._phase, said, end_ns=end_ns)


def _links(live: LiveRequest, parent: Context) -> Sequence[Link]:
    """Links to the previous claim, whose span has ended or is ended by this worker."""
    earlier = live.claim.earlier
    if earlier is None:
        return ()
    above = get_current_span(parent).get_span_context()
    span_id = _attempt_id(live, earlier.epoch)
    before = SpanContext(above.trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return (Link(before, {names.LINK: TAKEOVER if earlier.was_held else HANDED_BACK}),)


def _attempt_id(live: LiveRequest, epoch: int) -> int:
    return int.from_bytes(_digest("process", live.queue, live.id, live.entry_id, epoch, size=8), "big")


def _digest(*parts: str | int, size: int) -> bytes:
    """Derives an id, in practice never all zeros. If it were, a random id would replace it, and only a link be lost."""
    return blake2b("\n".join(map(str, parts)).encode(), digest_size=size).digest()

"""Client-side spans of a request: sending it, and the time until its reply has ended.

chat QUEUE       CLIENT, from the enqueue to the end of the reply, where somebody follows it
  send QUEUE     PRODUCER, until Redis has the request; workers' spans are below it
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager

from opentelemetry.context import Context, get_current
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.trace import Span, SpanKind, TracerProvider

from penstock.protocol.errors import RequestFailed, RequestRefused
from penstock.protocol.reply import Chunk, Reply
from penstock.protocol.telemetry import names
from penstock.protocol.telemetry.recorder import Attributes, SpanRecorder, headers_of, parent_of
from penstock.protocol.wire import GenerateRequest

LEFT = "left"
"""The outcome of a reply that was not read to its end."""


class ClientSpans:
    """Spans of one client."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._recorder = SpanRecorder(provider)

    @contextmanager
    def sending(self, queue: str, request: GenerateRequest) -> Iterator[GenerateRequest]:
        """Wraps an enqueue. Yields the request to send, with its trace context."""
        said = names.message_attributes(queue, "send", "send", request.id or "")
        span = self._recorder.start(f"send {queue}", SpanKind.PRODUCER, parent_of(request), said)
        error = None
        try:
            yield _below(span, request)
        except BaseException as caught:
            error = type(caught).__name__
            raise
        finally:
            self._recorder.end(span, error=error)

    def here(self) -> Context:
        """Returns the caller's current context."""
        return get_current()

    async def followed(
        self,
        queue: str,
        request: GenerateRequest,
        parent: Context,
        follow: Callable[[GenerateRequest], AsyncGenerator[Sequence[Chunk], None]],
        reply_of: Callable[[], Reply | None],
    ) -> AsyncGenerator[Sequence[Chunk], None]:
        """Yields what `follow` yields, recorded from the first iteration on.

        Args:
            queue: the queue that the request goes to.
            request: the request.
            parent: its parent context, unless it names one itself.
            follow: sends the request that it is given, and follows its reply.
            reply_of: the whole reply, once it has ended.
        """
        said = {**names.request_attributes(request, queue), names.REQUEST_ID: request.id or ""}
        name = f"{names.operation_of(request)} {queue}"
        span = self._recorder.start(name, SpanKind.CLIENT, parent_of(request) or parent, said)
        started_s, known = time.monotonic(), _Known()
        try:
            async with aclosing(follow(_below(span, request))) as batches:
                async for batch in batches:
                    if known.first_s is None:
                        known.first_s = time.monotonic() - started_s
                    yield batch
        except BaseException as caught:
            known.note(caught)
            raise
        finally:
            self._recorder.end(span, known.attributes(reply_of()), error=known.error)


class _Known:
    """Data about a reply that becomes known while it is read."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.error: str | None = None
        self._has_left = False

    def note(self, caught: BaseException) -> None:
        if isinstance(caught, RequestFailed | RequestRefused):
            self.error = caught.code
        elif isinstance(caught, Exception):
            self.error = type(caught).__name__
        else:  # GeneratorExit, CancelledError: nobody wants the rest
            self._has_left = True

    def attributes(self, reply: Reply | None) -> Attributes:
        said: dict[str, str | bool | int | float | Sequence[str]] = {}
        if self.first_s is not None:
            said[gen_ai.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = self.first_s
        if self._has_left:
            said[names.OUTCOME] = LEFT
        if reply is not None:
            usage = reply.usage
            said |= names.end_attributes(
                reply.request_id,
                [choice.finish_reason for choice in reply.choices],
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                reasoning_tokens=usage.reasoning_tokens,
            )
        return said


def _below(span: Span, request: GenerateRequest) -> GenerateRequest:
    """Returns the request as a child of `span`; unchanged if that could not be made."""
    headers = headers_of(span)
    return request.model_copy(update={"tracestate": None, **headers}) if headers else request

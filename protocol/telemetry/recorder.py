"""Starts and ends spans. Any failure in that is logged once, and has no other effect."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TypeAlias

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.protocol.version import __version__
from penstock.protocol.wire import GenerateRequest

SCHEMA_URL = Schemas.V1_44_0.value
"""The schema of the conventions that our spans' names follow."""

Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str]]

_W3C = TraceContextTextMapPropagator()
_log = logging.getLogger("penstock.telemetry")


class SpanRecorder:
    """Creates the spans of one process.

    Args:
        provider: receives them; None: the provider that the application has set up.

    Attributes:
        harmless: wraps code that runs only for a trace; an exception in it is logged once.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("penstock", __version__, provider, SCHEMA_URL)
        self.harmless = _Harmless()

    def start(
        self,
        name: str,
        kind: SpanKind,
        parent: Context | None,
        attributes: Attributes,
        *,
        start_ns: int | None = None,
        links: Sequence[Link] = (),
    ) -> Span:
        """Starts a span. Exceptions that pass through are never recorded: they may quote text.

        Args:
            name: by the conventions, with few distinct values.
            kind: by the conventions.
            parent: None: the current context.
            attributes: those known now.
            start_ns: nanoseconds since the epoch; None: now.
            links: to spans of other causes.
        """
        with self.harmless:
            return self._tracer.start_span(
                name, parent, kind, attributes, links, start_ns, record_exception=False, set_status_on_exception=False
            )
        return INVALID_SPAN

    def end(
        self, span: Span, attributes: Attributes | None = None, *, error: str | None = None, end_ns: int | None = None
    ) -> None:
        """Ends a span and hands it to the exporter. `error` is a code or a class name."""
        with self.harmless:
            if attributes:
                span.set_attributes(attributes)
            if error is not None:
                span.set_attribute(ERROR_TYPE, error)
                span.set_status(Status(StatusCode.ERROR))
            span.end(end_ns)


class _Harmless:
    """Wraps code that runs only for a trace: an exception ends the block and nothing else."""

    def __init__(self) -> None:
        self._has_failed = False

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self._has_failed:
            self._has_failed = True
            _log.warning("a span could not be recorded; what is traced goes on", exc_info=error)
        return True


def parent_of(request: GenerateRequest) -> Context | None:
    """Returns the parent context that a request names. None: it names none."""
    return context_of(request.traceparent, request.tracestate)


def context_of(traceparent: str | None, tracestate: str | None) -> Context | None:
    """Returns the span that W3C's two headers name. None: there is none."""
    if traceparent is None:
        return None
    carrier = {"traceparent": traceparent} | ({"tracestate": tracestate} if tracestate else {})
    context = _W3C.extract(carrier, Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def headers_of(span: Span) -> dict[str, str]:
    """Returns W3C's headers that name a span; empty if it is not valid."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier


def within(span: Span) -> Context:
    """Returns the context for a span's children, whatever is current."""
    return trace.set_span_in_context(span, Context())

"""The trace that an HTTP request is a part of, by W3C's two headers."""

from __future__ import annotations

from starlette.datastructures import Headers

from penstock.producer.wire import trace_context

TRACE_STATE = "trace"
"""In the state of an HTTP request: the same, of the span that the gateway has made of it, if it makes any."""


def carried_trace(headers: Headers) -> dict[str, str]:
    """What a client's headers say, as far as it can be used."""
    traceparents = headers.getlist("traceparent")
    if len(traceparents) != 1:
        return {}
    return trace_context(traceparents[0], ",".join(headers.getlist("tracestate")))

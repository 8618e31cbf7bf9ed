"""Trace context of an HTTP request, in W3C's two headers."""

from __future__ import annotations

from starlette.datastructures import Headers

from penstock.protocol.wire import trace_context

TRACE_STATE = "trace"
"""Key in the state of an HTTP request for the trace context of the gateway's own span, if it makes one."""


def carried_trace(headers: Headers) -> dict[str, str]:
    """Returns the client's headers, as far as they are valid."""
    traceparents = headers.getlist("traceparent")
    if len(traceparents) != 1:
        return {}
    return trace_context(traceparents[0], ",".join(headers.getlist("tracestate")))

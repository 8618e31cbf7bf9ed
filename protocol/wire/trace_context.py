"""W3C trace context (https://www.w3.org/TR/trace-context): the trace that a request is a part of."""

from __future__ import annotations

import re

MAX_TRACEPARENT_CHARS = 256

MAX_TRACESTATE_CHARS = 512
"""The length that every system passes on, by the recommendation."""

EXAMPLE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

# Version ff and ids of zeros are invalid; a version after 00 may append more.
_TRACEPARENT = re.compile(
    r"(?!ff|00.{53}.)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]*)?"
)
_MEMBER = r"[a-z0-9][a-z0-9_*/@-]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
_TRACESTATE = re.compile(rf"(?:{_MEMBER})?(?:[ \t]*,[ \t]*(?:{_MEMBER})?){{0,31}}")  # members may be empty


def is_traceparent(value: str) -> bool:
    """Whether this is a W3C traceparent that a request accepts."""
    return len(value) <= MAX_TRACEPARENT_CHARS and _TRACEPARENT.fullmatch(value) is not None


def is_tracestate(value: str) -> bool:
    """Whether this is a W3C tracestate that a request accepts."""
    return "=" in value and len(value) <= MAX_TRACESTATE_CHARS and _TRACESTATE.fullmatch(value) is not None


def trace_context(traceparent: object, tracestate: object) -> dict[str, str]:
    """Returns the usable ones of the two, by name. A `tracestate` without a valid `traceparent` is dropped."""
    if not (isinstance(traceparent, str) and is_traceparent(traceparent)):
        return {}
    if not (isinstance(tracestate, str) and is_tracestate(tracestate)):
        return {"traceparent": traceparent}
    return {"traceparent": traceparent, "tracestate": tracestate}

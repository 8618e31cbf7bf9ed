"""Structured logs: JSON lines, or coloured text on a terminal. Prompts and generated text are never logged."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, TextIO

import structlog

LogFormat = Literal["json", "console", "auto"]

# Local variables hold prompts, so tracebacks come without them.
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


def configure_logs(level: str = "info", style: LogFormat = "auto", stream: TextIO = sys.stderr) -> None:
    """Sets structlog up for this process, once, before anything is logged.

    Args:
        level: debug, info, warning or error.
        style: `auto` writes for people on a terminal and for machines elsewhere.
        stream: where the lines go.

    Raises:
        ValueError: the level is unknown.
    """
    threshold = logging.getLevelNamesMapping().get(level.upper())
    if threshold is None:
        raise ValueError(f"unknown log level {level!r}: use debug, info, warning or error")
    for_people = style == "console" or (style == "auto" and stream.isatty())
    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if for_people:
        processors.append(structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback))
    else:
        processors += (_TRACEBACKS, structlog.processors.JSONRenderer())
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )


def request_logger(request_id: str, traceparent: str | None = None) -> Any:
    """An immutable logger that names the request in every line."""
    log = structlog.get_logger("worker").bind(request_id=request_id)
    return log if traceparent is None else log.bind(traceparent=traceparent)

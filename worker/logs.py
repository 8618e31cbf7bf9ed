"""Structured logs: JSON lines, or coloured text on a terminal. Prompts and generated text are never logged."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TextIO

import structlog

from penstock.serving import log_lines
from penstock.serving.log_lines import LogLines, Rank
from penstock.worker.startup_report import STARTED, as_table

LogFormat = Literal["json", "console", "auto"]

# Local variables contain prompts, so tracebacks leave them out.
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
_REQUESTS = structlog.get_logger("worker")  # the bound logger takes the configuration at the time of use


VITAL = frozenset({"operator_action", "operator_action_failed", "drained", "stopped"})
"""Events, apart from errors, whose lines must never be lost: actions of operators, and the last event."""


@contextmanager
def service_logs(level: str, style: LogFormat) -> Iterator[LogLines]:
    """Configures logs for a service: logging never waits for stderr, and never fails if that can't be written to.

    Raises like `configure_logs`.
    """
    with log_lines.queued(sys.stderr, _say_dropped) as lines:
        configure_logs(level, style, sys.stderr, lines)
        yield lines


def _say_dropped(count: int) -> None:
    log = structlog.get_logger("worker")
    log.warning("log_lines_dropped", count=count)


def configure_logs(
    level: str = "info", style: LogFormat = "auto", stream: TextIO = sys.stderr, lines: LogLines | None = None
) -> None:
    """Configures structlog for this process, once, before anything is logged.

    Args:
        level: debug, info, warning or error.
        style: `auto` writes for people on a terminal and for machines elsewhere.
        stream: where the lines go.
        lines: queues them on the way there; None: the logging thread writes them.

    Raises:
        ValueError: the level is unknown.
    """
    threshold = logging.getLevelNamesMapping().get(level.upper())
    if threshold is None:
        raise ValueError(f"unknown log level {level!r}: use debug, info, warning or error")
    for_people = is_for_people(style, stream)
    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if for_people:
        processors.insert(0, _quote_unprintable)
        processors.append(_spread_out)
        render: Any = structlog.dev.ConsoleRenderer(exception_formatter=_printable_traceback)
    else:
        processors.append(_TRACEBACKS)
        render = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*processors, render if lines is None else _ranked(render)],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(stream) if lines is None else lambda *_: _Queued(lines),
        cache_logger_on_first_use=True,
    )
    _take_in(threshold)


class _Queued:
    """Logger that structlog writes to: each method is a level. False: the line was dropped."""

    def __init__(self, lines: LogLines) -> None:
        self.debug = self.info = self.warning = self.error = self.critical = lines.put


def _ranked(render: Any) -> Any:
    """Renders a line, and ranks its importance."""

    def process(logger: Any, method: str, event: MutableMapping[str, Any]) -> tuple[tuple[str, Rank], dict[str, Any]]:
        level = event["level"]
        is_vital = level in ("error", "critical") or event["event"] in VITAL
        rank = Rank.VITAL if is_vital else Rank.WARNING if level == "warning" else Rank.PLAIN
        return (render(logger, method, event), rank), {}

    return process


class _ToStructlog(logging.Handler):
    """Forwards records of the standard library's logging, used by libraries and the client, so that all lines look
    alike.
    """

    def emit(self, record: logging.LogRecord) -> None:
        told = {"exc_info": record.exc_info} if record.exc_info else {}
        level = min(logging.CRITICAL, max(logging.DEBUG, record.levelno // 10 * 10))  # structlog's levels only
        structlog.get_logger().log(level, record.getMessage(), logger=record.name, **told)


def _take_in(threshold: int) -> None:
    """Routes everything that is logged elsewhere in this process to structlog only."""
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog(threshold))


def is_for_people(style: LogFormat, stream: TextIO = sys.stderr) -> bool:
    """Checks whether lines are text rather than JSON."""
    return style == "console" or (style == "auto" and stream.isatty())


def request_logger(request_id: str, **said: str | None) -> Any:
    """Returns an immutable logger that adds the request's id and its given fields to every line."""
    known = {name: value for name, value in said.items() if value is not None}
    return _REQUESTS.bind(request_id=request_id, **known)


@dataclass(frozen=True, slots=True)
class _Quoted:
    """Text that the console renderer shows as Python writes it, with escapes."""

    text: str

    def __repr__(self) -> str:
        return repr(self.text)


def _quote_unprintable(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Quotes ids, error messages and the like, which come from outside: none may control the terminal."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[name] = _Quoted(value)
    return event


def _spread_out(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Renders the worker's introduction as a table below its line, as it has too many fields for one."""
    if event["event"] != STARTED:
        return event
    kept = {name: event[name] for name in ("event", "level", "timestamp")}
    fields = {name: value for name, value in event.items() if name not in kept}
    return {**kept, "event": f"{STARTED}\n{as_table(fields)}"}


def _printable_traceback(stream: TextIO, exc_info: Any) -> None:
    """Escapes tracebacks: exceptions may quote outside text."""
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    lines = text.getvalue().split("\n")
    stream.write("\n".join(line if line.isprintable() else repr(line)[1:-1] for line in lines))

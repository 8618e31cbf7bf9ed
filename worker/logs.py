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

from penstock.gateway import log_lines
from penstock.gateway.log_lines import LogLines, Rank
from penstock.worker.introduction import STARTED, as_table

LogFormat = Literal["json", "console", "auto"]

# Local variables hold prompts, so tracebacks come without them.
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
_REQUESTS = structlog.get_logger("worker")  # what it is bound to knows how logs are configured then


VITAL = frozenset({"operator_action", "operator_action_failed", "drained", "stopped"})
"""Events that are no errors, and of which no line is to be lost: what operators did, and the last one."""


@contextmanager
def service_logs(level: str, style: LogFormat) -> Iterator[LogLines]:
    """As `configure_logs`, for a service: who logs never waits for stderr, nor fails where it can't be written to.

    Raises as `configure_logs`.
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
    """Sets structlog up for this process, once, before anything is logged.

    Args:
        level: debug, info, warning or error.
        style: `auto` writes for people on a terminal and for machines elsewhere.
        stream: where the lines go.
        lines: takes them instead, on their way there; None: whoever logs writes them.

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
    """What structlog writes to: each method is a level. False: the line was dropped."""

    def __init__(self, lines: LogLines) -> None:
        self.debug = self.info = self.warning = self.error = self.critical = lines.put


def _ranked(render: Any) -> Any:
    """Renders a line, and says what it is worth."""

    def process(logger: Any, method: str, event: MutableMapping[str, Any]) -> tuple[tuple[str, Rank], dict[str, Any]]:
        level = event["level"]
        is_vital = level in ("error", "critical") or event["event"] in VITAL
        rank = Rank.VITAL if is_vital else Rank.WARNING if level == "warning" else Rank.PLAIN
        return (render(logger, method, event), rank), {}

    return process


class _ToStructlog(logging.Handler):
    """Libraries, and the client, log with the standard library: their lines are to look like all others."""

    def emit(self, record: logging.LogRecord) -> None:
        told = {"exc_info": record.exc_info} if record.exc_info else {}
        level = min(logging.CRITICAL, max(logging.DEBUG, record.levelno // 10 * 10))  # those that structlog has
        structlog.get_logger().log(level, record.getMessage(), logger=record.name, **told)


def _take_in(threshold: int) -> None:
    """Has what is logged elsewhere in this process come here, and nowhere else."""
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog(threshold))


def is_for_people(style: LogFormat, stream: TextIO = sys.stderr) -> bool:
    """Whether lines are text rather than JSON."""
    return style == "console" or (style == "auto" and stream.isatty())


def request_logger(request_id: str, **said: str | None) -> Any:
    """An immutable logger that has the request's id, and what it says of itself, in every line."""
    known = {name: value for name, value in said.items() if value is not None}
    return _REQUESTS.bind(request_id=request_id, **known)


@dataclass(frozen=True, slots=True)
class _Quoted:
    """Text that the console renderer shows as Python writes it, with escapes."""

    text: str

    def __repr__(self) -> str:
        return repr(self.text)


def _quote_unprintable(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Ids, messages of errors and the like come from outside: none of them may steer the terminal."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[name] = _Quoted(value)
    return event


def _spread_out(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """What a worker says of itself has more fields than a line takes: they become a table below it."""
    if event["event"] != STARTED:
        return event
    kept = {name: event[name] for name in ("event", "level", "timestamp")}
    fields = {name: value for name, value in event.items() if name not in kept}
    return {**kept, "event": f"{STARTED}\n{as_table(fields)}"}


def _printable_traceback(stream: TextIO, exc_info: Any) -> None:
    """Messages of exceptions may quote what came from outside, too."""
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    lines = text.getvalue().split("\n")
    stream.write("\n".join(line if line.isprintable() else repr(line)[1:-1] for line in lines))

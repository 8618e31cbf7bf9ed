"""The worker's configuration, errors and logs."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
import structlog

from penstock.worker.config import WorkerConfig, default_name
from penstock.worker.errors import BadWorkerConfig, WorkerError
from penstock.worker.logs import configure_logs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queue", "a{b}"),
        ("name", ""),
        ("name", "unowned"),
        ("heartbeat_ttl_s", 0),
        ("block_ms", 10_001),
        ("flush_interval_ms", -1),
        ("max_prompt_tokens", 0),
        ("health_host", ""),
        ("health_port", 65_536),
        ("max_attempts", 0),
    ],
)
def test_bad_config_names_the_value(name: str, value: Any) -> None:
    with pytest.raises(BadWorkerConfig, match=f"{name} must be .* not {value!r}"):
        WorkerConfig(**{name: value})


def test_names_of_processes_differ() -> None:
    assert default_name() != default_name()
    assert WorkerConfig().name != WorkerConfig().name


def test_exit_statuses_differ() -> None:
    statuses = [error.exit_status for error in WorkerError.__subclasses__()]
    assert len(set(statuses)) == len(statuses)
    assert 0 not in statuses


def test_tracebacks_are_logged_without_local_variables() -> None:
    for style in ("json", "console"):
        stream = io.StringIO()
        configure_logs("info", style, stream)  # type: ignore[arg-type]
        hidden = "SEC" + "RET"
        try:
            int(hidden[:0])
        except ValueError:
            structlog.get_logger().exception("failed")
        structlog.reset_defaults()
        assert "ValueError" in stream.getvalue()
        assert "SECRET" not in stream.getvalue()


def test_nothing_that_comes_from_outside_steers_the_terminal() -> None:
    """The renderer colours its own parts, so each hostile text must be there, and only in escapes."""
    hostile = {
        "clear": "\x1b[2J",
        "title": "\x1b]0;t\x07",
        "c1": "\x9b31m",
        "back": "a\rb",
        "bidi": "\u202e",
        "half": "\ud800",
    }

    def fail(message: str) -> None:
        raise ValueError(message)

    stream = io.StringIO()
    configure_logs("info", "console", stream)
    log = structlog.get_logger().bind(request_id="plain", **hostile)
    log.warning(hostile["clear"], spaced="a b " + hostile["clear"], error=ValueError(hostile["clear"]))
    try:
        fail("".join(hostile.values()) + "\nsecond line")
    except ValueError:
        log.exception("failed")
    structlog.reset_defaults()
    shown = stream.getvalue()
    for text in hostile.values():
        assert text not in shown
        assert repr(text) in shown
    assert "\nValueError: " + repr("".join(hostile.values()))[1:-1] + "\nsecond line" in shown
    assert "request_id" in shown
    assert "'plain'" not in shown
    assert all(part.isprintable() for part in re.sub(r"\x1b\[\d+m", "", shown).split("\n"))


def test_log_level_and_format() -> None:
    stream = io.StringIO()
    configure_logs("warning", "auto", stream)
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud", n=1)
    structlog.reset_defaults()
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line).items() >= {"event": "loud", "level": "warning", "n": 1}.items()
    with pytest.raises(ValueError, match="shout"):
        configure_logs("shout")

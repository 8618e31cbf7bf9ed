from __future__ import annotations

import io
import json
import logging
import os
import pty
from collections.abc import Callable

import pytest
import structlog

from penstock.worker.logs import LogFormat, configure_logs, is_for_people, request_logger

Logged = Callable[..., io.StringIO]


@pytest.fixture
def logged() -> Logged:
    def configure(style: LogFormat, level: str = "info") -> io.StringIO:
        stream = io.StringIO()
        configure_logs(level, style, stream)
        return stream

    return configure


def test_auto_is_for_people_on_a_terminal_alone() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        assert is_for_people("auto", terminal)
        assert not is_for_people("json", terminal)
    os.close(ours)
    assert not is_for_people("auto", io.StringIO())
    assert is_for_people("console", io.StringIO())


def test_what_the_standard_library_logs_has_the_same_form(logged: Logged) -> None:
    stream = logged("json", "warning")
    log = logging.getLogger("penstock.producer.reading.reader")
    log.warning("reading replies from %s failed: %s", "here", "100 % gone")
    log.info("not shown")
    try:
        int("broken")
    except ValueError:
        log.log(logging.ERROR + 5, "unexpected", exc_info=True)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["level"]) == ("reading replies from here failed: 100 % gone", "warning")
    assert first["logger"] == "penstock.producer.reading.reader"
    assert (second["event"], second["level"]) == ("unexpected", "error")
    assert second["exception"][0]["exc_type"] == "ValueError"


def test_json_lines_name_level_time_and_request(logged: Logged) -> None:
    stream = logged("json")
    request_logger("r-1", traceparent="00-trace", tenant=None).info("request_ended", tokens=3)
    line = json.loads(stream.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "request_ended", "level": "info", "request_id": "r-1", "traceparent": "00-trace", "tokens": 3
    }  # fmt: skip


def test_a_traceback_has_no_local_variables(logged: Logged) -> None:
    stream = logged("json")
    prompt = "a secret prompt"
    try:
        _ = 1 // (len(prompt) - 15)
    except ZeroDivisionError:
        structlog.get_logger().exception("failed")
    assert "secret" not in stream.getvalue()
    assert json.loads(stream.getvalue())["exception"][0]["exc_type"] == "ZeroDivisionError"


def test_what_is_below_the_level_is_left_out(logged: Logged) -> None:
    stream = logged("json", "warning")
    structlog.get_logger().info("quiet")
    structlog.get_logger().critical("loud")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["loud"]
    with pytest.raises(ValueError, match="unknown log level 'chatty'"):
        configure_logs("chatty")


def test_no_text_from_outside_steers_a_terminal(logged: Logged) -> None:
    stream = logged("console")
    structlog.get_logger().warning("request_refused", reason="\x1b]0;owned\x07", note="plain")
    assert "\x1b]0" not in stream.getvalue()
    assert "\\x1b]0;owned" in stream.getvalue()

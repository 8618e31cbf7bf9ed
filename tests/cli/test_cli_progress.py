from __future__ import annotations

import subprocess
import sys

import pytest
from structlog.testing import capture_logs

from penstock.engine.progress import BYTES
from penstock.local.progress import shown, spinner
from tests.cli.cli_process import Terminal, environment
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S

SHOW = """
from penstock.local.progress import shown
with shown("warming up", "programs") as report:
    report(1, 2, "[32] tokens")
with shown("loading", "bytes") as report:
    report(1_250_000_000, 2_500_000_000, "weights")
"""
SPIN = """
from penstock.local.progress import spinner
with spinner("starting") as say:
    say("going on [1]")
"""


def on_terminal(code: str) -> str:
    with Terminal() as terminal:
        variables = environment(TERM="xterm", COLUMNS="120")
        subprocess.run(
            [sys.executable, "-c", code], stderr=terminal.device, cwd=ROOT, env=variables, check=True, timeout=WAIT_S
        )
        return terminal.text


def test_a_terminal_sees_a_bar_with_units() -> None:
    text = on_terminal(SHOW)
    for part in ("warming up", "50%", "1/2 programs", "[32] tokens", "1.2/2.5 GB", "weights"):
        assert part in text


def test_a_terminal_sees_a_spinner_that_goes() -> None:
    text = on_terminal(SPIN)
    assert "going on [1]" in text
    assert text.endswith("\x1b[2K")


def test_nobody_else_sees_a_spinner(capsys: pytest.CaptureFixture[str]) -> None:
    with capture_logs() as lines, spinner("starting") as say:
        say("going on [1]")
    assert lines == []
    assert capsys.readouterr() == ("", "")


def test_others_see_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with capture_logs() as lines, shown("warming up") as report:
        report(1, 2, "32 tokens")
    assert [(line["event"], line.get("done", False)) for line in lines] == [("warming up", False), ("warming up", True)]
    assert capsys.readouterr().err == ""


def test_a_failed_step_is_not_said_to_be_done() -> None:
    with capture_logs() as lines, pytest.raises(OSError, match="disk"), shown("loading"):
        raise OSError("disk")
    assert [line["event"] for line in lines] == ["loading"]


def test_log_lines_name_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.local.progress.LOG_INTERVAL_S", 0.0)
    with capture_logs() as lines, shown("loading", BYTES) as report:
        report(1, 2, "weights")
    assert lines[1] == {"event": "loading", "log_level": "info", "unit": "bytes", "step": 1, "of": 2, "what": "weights"}


def test_readiness_is_told_too() -> None:
    said: list[str] = []
    with capture_logs(), shown("loading the model", BYTES, said.append) as report:
        report(1_000_000, 2_000_000, "weights")
        report(0, 0, "compiling")
    assert said == ["loading the model", "loading the model: 1.0/2.0 MB", "loading the model: compiling"]


def test_what_is_not_counted_is_logged_as_it_begins() -> None:
    with capture_logs() as lines, shown("loading the model", BYTES) as report:
        report(0, 0, "compiling")
        report(1, 2, "weights")
    assert [line.get("what") for line in lines] == [None, "compiling", None]

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from cli_process import ROOT, environment
from structlog.testing import capture_logs

from penstock.worker.cli.progress import shown

SHOW = """
from penstock.worker.cli.progress import shown
with shown("warming up") as report:
    report(1, 2, "32 tokens")
"""


def test_a_terminal_sees_a_bar() -> None:
    ours, theirs = pty.openpty()
    try:
        variables = environment(TERM="xterm", COLUMNS="100")
        subprocess.run([sys.executable, "-c", SHOW], stderr=theirs, cwd=ROOT, env=variables, check=True, timeout=60)
        text = os.read(ours, 65_536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    for part in ("warming up", "50%", "32 tokens"):
        assert part in text


def test_others_see_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with capture_logs() as lines, shown("warming up") as report:
        report(1, 2, "32 tokens")
    assert [(line["event"], line.get("done", False)) for line in lines] == [("warming up", False), ("warming up", True)]
    assert capsys.readouterr().err == ""


def test_a_failed_step_is_not_said_to_be_done() -> None:
    with capture_logs() as lines, pytest.raises(OSError, match="disk"), shown("loading"):
        raise OSError("disk")
    assert [line["event"] for line in lines] == ["loading"]

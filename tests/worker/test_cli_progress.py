from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from cli_process import ROOT, environment
from structlog.testing import capture_logs

from penstock.worker.cli.progress import amount, shown

SHOW = """
from penstock.worker.cli.progress import shown
with shown("warming up", "shapes") as report:
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
    for part in ("warming up", "1 of 2 shapes", "32 tokens"):
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


@pytest.mark.parametrize(
    ("done", "total", "unit", "text"),
    [
        (12, 40, "shapes", "12 of 40 shapes"),
        (3, 4, "", "3 of 4"),
        (400_000_000, 1_234_000_000, "bytes", "0.4 of 1.2 GB"),
        (0, 6_900_000, "bytes", "0.0 of 6.9 MB"),
        (1500, 20_000, "bytes", "1.5 of 20.0 kB"),
        (5, 900, "bytes", "5 of 900 bytes"),
    ],
)
def test_amounts_have_units(done: int, total: int, unit: str, text: str) -> None:
    assert amount(done, total, unit) == text


def test_readiness_is_told_too() -> None:
    said: list[str] = []
    with capture_logs(), shown("loading the model", "bytes", said.append) as report:
        report(1_000_000, 2_000_000, "weights")
    assert said == ["loading the model", "loading the model: 1.0 of 2.0 MB"]

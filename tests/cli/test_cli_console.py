from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from rich.table import Table

from penstock.local.console import console
from tests.cli.cli_process import environment
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S

LONG = "x" * 300
SHOW = f"""
from rich.table import Table
from penstock.local.console import console
table = Table("name")
table.add_row({LONG!r})
console(stderr=True).print(table)
"""


def test_a_table_for_a_file_or_a_pipe_is_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("name", "state", box=None)
    table.add_row(LONG, ":smile: [1]")
    console().print(table, markup=False)
    console(stderr=True).print(LONG, "12 s")
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()] == [["name", "state"], [LONG, ":smile:", "[1]"]]
    assert err == f"{LONG} 12 s\n"


def test_a_terminal_bounds_the_width() -> None:
    ours, theirs = pty.openpty()
    try:
        variables = environment(TERM="xterm", COLUMNS="60")
        subprocess.run([sys.executable, "-c", SHOW], stderr=theirs, cwd=ROOT, env=variables, check=True, timeout=WAIT_S)
        lines = os.read(ours, 65_536).decode().splitlines()
    finally:
        os.close(ours)
        os.close(theirs)
    assert len(lines[0]) == 60
    assert "…" in lines[3]

"""Lines that libraries write to stderr, past our log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.packages import ROOT
from tests.support.patience import WAIT_S

PROGRAM = """
import ctypes, os, sys
from penstock.serving import log_lines

line = b"a library's own line\\n" * 100
with log_lines.queued(sys.stderr, print) as lines:
    lines.put("ours", log_lines.Rank.VITAL)
    for _ in range(2000):
        ctypes.CDLL(None).write(2, line, len(line))
    print("not held up", flush=True)
    os.read(0, 1)  # until somebody reads
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a pipe is opened anew by /proc")
def test_what_libraries_write_never_waits() -> None:
    """Libraries write 4 MB to a pipe that nobody reads: what does not fit is lost; our own line waits, and comes."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=ROOT,
    )  # fmt: skip
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"not held up\n"
        process.stdin.close()
        text = process.stderr.read()
        assert b"ours\n" in text
        assert b"a library's own line" in text
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize("kind", ["file", "reader is gone"])
def test_what_cannot_be_opened_anew_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT) if kind == "file" else writer
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=descriptor,
        cwd=ROOT, check=False,
    )  # fmt: skip
    for each in {descriptor, writer}:
        os.close(each)
    assert (done.returncode, done.stdout) == (0, b"not held up\n")
    if kind == "file":
        assert (tmp_path / "log").stat().st_size > 4_000_000

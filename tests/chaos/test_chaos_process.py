"""Workers with the fake engine end with the harness, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.tools.chaos.fleet import WorkerSetup
from tests.support.patience import WAIT_S, slow

PROGRAM = """
import sys
from pathlib import Path
from penstock.tools.chaos.process import FakeWorker
config = {"queue": "q", "health_port": None}
worker = FakeWorker("redis://127.0.0.1:1/0", Path(sys.argv[1]), {}, config)
print(worker.pid, flush=True)
input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a signal at the parent's death")
@pytest.mark.parametrize("is_frozen", [slow(False), True])
def test_a_harness_that_is_killed_leaves_no_process_behind(tmp_path: Path, is_frozen: bool) -> None:
    log = tmp_path / "log"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as harness:
        assert harness.stdout is not None
        worker = int(harness.stdout.readline())
        wait_for(lambda: log.exists() and "redis_unavailable" in log.read_text())
        server = int(stat_of(worker)[1])
        assert server != harness.pid
        if is_frozen:
            os.kill(worker, signal.SIGSTOP)
        harness.kill()
    for pid in (worker, server):
        wait_for(lambda pid=pid: stat_of(pid)[0] in ("", "Z"))  # gone, or nobody has asked yet how it ended


def test_a_worker_that_was_ended_before_it_began_has_not_joined(tmp_path: Path) -> None:
    """A run may end right after a kill: the next worker is told to drain before it has opened its log."""
    assert not WorkerSetup("q", tmp_path, None, {}).has_joined("w0-2")


def stat_of(pid: int) -> list[str]:
    """Returns state, parent and more of a process; one empty text if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return [""]


def wait_for(condition: Callable[..., object]) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_s, "not within a minute"
        time.sleep(0.02)

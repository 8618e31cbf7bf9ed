"""docs/tutorial.md runs block by block, unchanged, on the test's own server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.local.worker_process import DEMO_SIZES
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
SMALL = {f"PENSTOCK_{name.upper()}": str(value) for name, value in DEMO_SIZES.items()}
"""Sizes for all workers, which would spend most of the test warming up those of a deployment."""


@pytest.mark.skipif(sys.platform != "linux", reason="it has bash")
async def test_three_workers_and_a_kill(tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", TUTORIAL, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    marked = "\n".join(f"echo '# block {number}'\n{block}" for number, block in enumerate(blocks))
    with EmbeddedServer() as server:
        out = await bash(marked, tmp_path, REDIS_URL=server.url, PENSTOCK_REDIS_URL=server.url, **SMALL)
    workers, quiet, killed, replaced = re.split(r"# block \d\n", out)[1:]
    assert all(name in workers for name in ("one", "two", "three"))
    assert workers.endswith("347 + 85 = 432\n")
    assert quiet == "300\n"
    assert killed.endswith("the same answers, to the letter\n")
    assert '"lost": "one"' in killed
    assert re.search(r"one\s+lost", killed)
    assert "r-i-v-e-r" in replaced
    stories = (tmp_path / "disturbed.txt").read_text().splitlines()
    assert len(stories) == 300
    assert all(len(story) > 20 for story in stories)


async def bash(script: str, folder: Path, **environment: str) -> str:
    """Runs the script in a process group, of which nothing is left afterwards; returns its output."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    process = await asyncio.create_subprocess_exec(
        "bash", "-euo", "pipefail", "-c", script,
        cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        env={**os.environ, "PATH": path, "COLUMNS": "200", **environment},
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(), 3 * WAIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, (out.decode(), err.decode())
    return out.decode()

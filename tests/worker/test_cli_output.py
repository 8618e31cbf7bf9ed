"""Commands whose output can't be written: one line says so, and no traceback."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from cli_process import ROOT, environment
from patience import WAIT_S, slow
from worker_harness import running_worker

from penstock.worker.local.embedded import EmbeddedServer

COMMANDS = {
    "send": ["send", "--queue", "q", "--plain", "x ü", "--max-tokens", "2"],
    "top": ["top", "--once", "--queue", "q"],
    "workers": ["workers", "--queue", "q"],
    "card": ["card", "--queue", "q"],
}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    with EmbeddedServer() as server:
        async with running_worker(server.url, name="w0"):
            yield server.url


async def run(url: str, command: list[str], stdout: Any, closed: str = "", **variables: str) -> tuple[int, str]:
    """The exit status, and what stands on stderr."""
    words = [sys.executable, "-m", "penstock", *command, "--redis-url", url]
    if closed:
        words = ["sh", "-c", f'exec "$@" {closed}', "sh", *words]
    process = await asyncio.create_subprocess_exec(
        *words, cwd=ROOT, env=environment(**variables), stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE
    )
    _, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode is not None
    return process.returncode, err.decode()


@pytest.mark.parametrize("name", ["send", "top", slow("workers"), slow("card")])
async def test_an_output_that_cannot_be_written(name: str, url: str) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    reader, gone = os.pipe()
    os.close(reader)
    for stdout in (full, gone):
        status, err = await run(url, COMMANDS[name], stdout)
        assert (status, len(err.splitlines()) <= 1, "Traceback" in err) == (1, True, False), err
        os.close(stdout)
    status, err = await run(url, COMMANDS[name], subprocess.DEVNULL, closed=">&-")
    assert (status, "Traceback" in err) == (0, False)
    status, err = await run(url, COMMANDS[name], subprocess.DEVNULL, closed="2>/dev/full")
    assert status == 0


@pytest.mark.parametrize("name", ["send", "top", slow("workers"), slow("card")])
async def test_an_output_of_another_encoding_and_of_no_width(name: str, url: str) -> None:
    narrow = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "COLUMNS": "1"}
    assert await run(url, COMMANDS[name], subprocess.DEVNULL, **narrow) == (0, "")

"""Environments that `make test-clients` makes, and how programs run in them."""

from __future__ import annotations

import asyncio
import shutil
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

from tests.clients.programs import HERE
from tests.support.processes import ended

ENVIRONMENTS = Path(sys.prefix) / "clients"
TIMEOUT_S = 300


def python_of(name: str) -> Path:
    python = ENVIRONMENTS / name / "bin" / "python"
    assert python.exists(), f"not installed: {name}; `make test-clients` does that"
    return python


def in_browser(script: str) -> tuple[Path, Path]:
    """Returns what runs a script that drives a browser."""
    return in_node("chromium", script)


def in_node(name: str, script: str) -> tuple[Path, Path]:
    """Copies scripts to where node finds their packages; returns node and the copy of one."""
    node, place = shutil.which("node"), ENVIRONMENTS / name
    assert node is not None, "not installed: node"
    assert (place / "node_modules").exists(), f"not installed: {name}; `make test-clients` does that"
    for file in (HERE / name).glob("*.mjs"):
        shutil.copy(file, place / file.name)
    return Path(node), place / script


async def run(*command: str | Path) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    finally:
        await ended(process)
    return process.returncode, output.decode(errors="replace")

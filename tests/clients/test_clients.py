"""Clients that are too heavy for the project's own environment, each in one of its own: `make test-clients`."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from gateway_model import serving_model

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv" / "clients"
TIMEOUT_S = 300


@pytest.mark.clients
@pytest.mark.timeout(900)
async def test_clients_get_what_they_ask_for_unmodified(tmp_path: Path, compile_cache: Path) -> None:
    programs = {name: (python_of(name), HERE / f"{name}_chats.py") for name in ("langchain", "litellm")}
    programs["chromium"] = browser_of("chromium")
    async with serving_model(tmp_path, compile_cache) as gateway:
        for name, program in programs.items():
            status, output = await run(*program, gateway.url)
            assert status == 0, f"{name}:\n{output}"
            assert output.count("passed:") >= 5


def python_of(name: str) -> Path:
    python = ENVIRONMENTS / name / "bin" / "python"
    assert python.exists(), f"not installed: {name}; `make test-clients` does that"
    return python


def browser_of(name: str) -> tuple[Path, Path]:
    """What drives it, copied to where node finds the packages that it needs."""
    node = shutil.which("node")
    assert node is not None, "not installed: node, which drives Chromium"
    assert (ENVIRONMENTS / name / "node_modules").exists(), f"not installed: {name}; `make test-clients` does that"
    return Path(node), shutil.copy(HERE / name / "try_page.mjs", ENVIRONMENTS / name / "try_page.mjs")


async def run(*command: str | Path) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode(errors="replace")

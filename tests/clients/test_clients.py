"""Clients that are too heavy for the project's own environment, each in one of its own: `make test-clients`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from gateway_model import serving_model

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv" / "clients"
TIMEOUT_S = 300


@pytest.mark.clients
@pytest.mark.timeout(900)
async def test_clients_get_what_they_ask_for_unmodified(tmp_path: Path, compile_cache: Path) -> None:
    scripts = {name: ENVIRONMENTS / name / "bin" / "python" for name in ("langchain", "litellm")}
    absent = [name for name, python in scripts.items() if not python.exists()]
    assert not absent, f"not installed: {', '.join(absent)}; `make test-clients` does that"
    async with serving_model(tmp_path, compile_cache) as gateway:
        for name, python in scripts.items():
            status, output = await run(python, HERE / f"{name}_chats.py", gateway.url)
            assert status == 0, f"{name}:\n{output}"
            assert output.count("passed:") >= 5


async def run(python: Path, script: Path, url: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        python, script, url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode(errors="replace")

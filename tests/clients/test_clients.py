"""Clients too heavy for the project's own environment, each in an environment of its own: `make test-clients`."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine
from tests.support.programs.gateway_harness import new_key, running_gateway
from tests.support.programs.gateway_model import serving_model
from tests.support.programs.worker_harness import read_reply, running_worker, send

HERE = Path(__file__).parent
ENVIRONMENTS = Path(sys.prefix) / "clients"
TIMEOUT_S = 300


@pytest.mark.clients
@pytest.mark.timeout(900)
async def test_clients_get_what_they_ask_for_unmodified(tmp_path: Path, compile_cache: Path) -> None:
    programs = {name: (python_of(name), HERE / f"{name}_chats.py") for name in ("langchain", "litellm")}
    programs["chromium"] = in_browser("try_page.mjs")
    async with serving_model(tmp_path, compile_cache) as gateway:
        for name, program in programs.items():
            status, output = await run(*program, gateway.url)
            assert status == 0, f"{name}:\n{output}"
            assert output.count("passed:") >= 5


@pytest.mark.clients
async def test_an_operator_looks_after_a_queue_in_a_browser(redis: RedisClient, redis_url: str) -> None:
    await redis.xadd(keys.dead("q"), {"id": "gone", "code": "c", "field:prompt": "a secret prompt"}, id="1-0")
    secret = await new_key(redis_url, admin=True)
    async with (
        running_gateway(redis_url) as gateway,
        running_worker(redis_url, FakeEngine(step_s=0.01), name="one") as drained,
        running_worker(redis_url, FakeEngine(step_s=0.01), name="two"),
    ):
        await send(redis, prompt="a secret prompt", id="endless", tenant="acme", max_tokens=10**6)
        status, output = await run(*in_browser("try_operations.mjs"), gateway.url, secret.text)
        assert status == 0, output
        assert output.count("passed:") == 6
        assert (await read_reply(redis, "endless")).end.finish_reason == "cancelled"
        await drained.task


def python_of(name: str) -> Path:
    python = ENVIRONMENTS / name / "bin" / "python"
    assert python.exists(), f"not installed: {name}; `make test-clients` does that"
    return python


def in_browser(script: str) -> tuple[Path, Path]:
    """Copies the script that drives a browser to where node finds its packages; returns node and the copy."""
    node, place = shutil.which("node"), ENVIRONMENTS / "chromium"
    assert node is not None, "not installed: node, which drives Chromium"
    assert (place / "node_modules").exists(), "not installed: chromium; `make test-clients` does that"
    for name in ("browser.mjs", script):
        shutil.copy(HERE / "chromium" / name, place / name)
    return Path(node), place / script


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

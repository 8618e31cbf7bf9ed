"""The Python of README.md, docs/client.md and docs/migration.md as it stands there, and what they say that it prints.

A worker with the demo model and a gateway answer; what that model was not taught, a scripted worker does.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fakes import ScriptedReply, ScriptedWorker
from gateway_harness import running_gateway
from gateway_model import WORKER
from patience import WAIT_S

from docs.scripts.pages import ROOT, Block, page
from penstock.producer.wire import ChunkEntry, ToolCallDelta
from penstock.worker.local.embedded import EmbeddedServer
from penstock.worker.local.worker_process import local_worker, wait_joined

FOREIGN = ("import celery", "from celery", "import arq", "from arq")  # what one comes from is not installed


def python_of(name: str) -> list[Block]:
    return [block for block in page(name).blocks if block.language == "python" and not block.text.startswith(FOREIGN)]


DOCUMENTED = [
    pytest.param(name, block, id=f"{name}:{block.line}")
    for name in ("README.md", "docs/migration.md")
    for block in python_of(name)
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def addresses(compile_cache: Path) -> AsyncIterator[dict[str, str]]:
    """Where a gateway and Redis are, by where the pages have them."""
    settings = {**WORKER, "queue": "default", "model": "demo", "compile_cache_dir": str(compile_cache)}
    with EmbeddedServer() as server:
        async with local_worker(server.url, settings) as worker:
            await wait_joined(worker, server.url, settings["queue"], settings["name"])
            async with running_gateway(server.url) as gateway:
                yield {"redis://localhost:6379/0": server.url, "http://127.0.0.1:8000": gateway.url}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("name", "block"), DOCUMENTED)
async def test_documented_code_prints_what_is_documented(name: str, block: Block, addresses: dict[str, str]) -> None:
    code = block.text
    for there, here in addresses.items():
        code = code.replace(there, here)
    assert code != block.text
    assert await printed(code) == page(name).printed_after(block)


async def test_the_documented_tool_is_called(redis_url: str) -> None:
    block = python_of("docs/client.md")[0]
    async with ScriptedWorker(redis_url, ask_for_the_weather) as worker:
        out = await printed(block.text, REDIS_URL=redis_url)
    assert out == "Yes: It rains in Oslo all day.\n"
    assert [tool["function"]["name"] for tool in worker.taken[0].tools or ()] == ["weather"]
    assert [message.role for message in worker.taken[1].messages or ()] == ["user", "assistant", "tool"]


async def ask_for_the_weather(reply: ScriptedReply) -> None:
    """Calls the tool, and repeats what it says."""
    messages = reply.request.messages or ()
    await reply.own()
    if messages[-1].role == "tool":
        await reply.chunk(f"Yes: {messages[-1].content}")
        await reply.end()
        return
    call = ToolCallDelta(index=0, id="call_1", name="weather", arguments='{"city": "Oslo"}')
    await reply.write(ChunkEntry(index=0, offset=0, tokens=(1,), text="", tool_calls=(call,)))
    reply.tokens[0] = 1
    await reply.end("tool_calls")


async def printed(code: str, **variables: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    return out.decode()

"""The code of README.md, batch.md, client.md, gateway.md and migration.md runs as it stands, and prints what they say.

A worker with the demo model and a gateway answer; a scripted worker does what that model was not trained for.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from docs.scripts.pages import Block, page
from penstock.local.embedded import EmbeddedServer
from penstock.local.worker_process import local_worker, wait_joined
from penstock.protocol.wire import ChunkEntry, ToolCallDelta
from tests.support.patience import WAIT_S
from tests.support.processes import ended
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_harness import running_gateway
from tests.support.programs.gateway_model import WORKER


def python_of(name: str) -> list[Block]:
    return [block for block in page(name).blocks if block.language == "python"]


DOCUMENTED = [
    pytest.param(name, block, id=f"{name}:{block.line}")
    for name in ("README.md", "docs/batch.md", "docs/gateway.md", "docs/migration.md")
    for block in python_of(name)
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def addresses(compile_cache: Path) -> AsyncIterator[dict[str, str]]:
    """Maps the addresses of Redis and the gateway in the pages to real ones."""
    settings = {**WORKER, "queue": "default", "model": "demo", "compile_cache_dir": str(compile_cache)}
    with EmbeddedServer() as server:
        async with local_worker(server.url, settings) as worker:
            await wait_joined(worker, server.url, settings["queue"], settings["name"])
            async with running_gateway(server.url) as gateway:
                yield {"redis://localhost:6379/0": server.url, "http://127.0.0.1:8000": gateway.url}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("name", "block"), DOCUMENTED)
async def test_documented_code_prints_what_is_documented(
    name: str, block: Block, addresses: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert await printed_by("-c", moved(block.text, addresses)) == page(name).printed_after(block)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_documented_batch_is_written(
    addresses: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = (block for block in page("docs/batch.md").blocks if block.language == "sh")
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    url = addresses["redis://localhost:6379/0"]
    out = await printed_by("-ec", block.text, program="bash", PATH=path, PENSTOCK_REDIS_URL=url)
    assert out.startswith("2 rows in ")
    rows = [json.loads(line) for line in (await asyncio.to_thread(Path("spelled.jsonl").read_text)).splitlines()]
    assert [row["reply_text"] for row in rows] == ["r-i-v-e-r", "s-t-o-n-e"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.asyncio(loop_scope="module")
async def test_the_documented_request_for_a_message_is_answered(addresses: dict[str, str]) -> None:
    (block,) = (block for block in page("docs/gateway.md").blocks if "curl" in block.text)
    message = json.loads(await printed_by("-ec", moved(block.text, addresses), program="bash"))
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["content"][0]["text"]


async def test_the_documented_key_is_made_listed_and_revoked(redis_url: str) -> None:
    (block,) = (block for block in page("docs/gateway.md").blocks if "penstock keys create" in block.text)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    out = await printed_by("-ec", block.text, program="bash", PATH=path, PENSTOCK_REDIS_URL=redis_url, COLUMNS="200")
    key, titles, listed, revoked = out.splitlines()
    key_id = revoked.removesuffix(": revoked")
    assert key_id in key
    assert titles.split()[:3] == ["id", "name", "state"]
    assert listed.split()[:5] == [key_id, "webshop", "active", "acme", "qwen3-8b"]


def moved(text: str, addresses: dict[str, str]) -> str:
    """Returns the text with the addresses of this run."""
    found = text
    for there, here in addresses.items():
        found = found.replace(there, here)
    assert found != text
    return found


async def test_the_documented_tool_is_called(redis_url: str) -> None:
    block = python_of("docs/client.md")[0]
    async with ScriptedWorker(redis_url, ask_for_the_weather) as worker:
        out = await printed_by("-c", block.text, REDIS_URL=redis_url)
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


async def printed_by(*arguments: str, program: str = sys.executable, **variables: str) -> str:
    process = await asyncio.create_subprocess_exec(
        program, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **variables},
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    finally:
        await ended(process)
    assert process.returncode == 0, err.decode()
    return out.decode()

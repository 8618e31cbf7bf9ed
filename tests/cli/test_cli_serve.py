"""Tests of `penstock serve`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2 as httpx
import pytest
from openai.types.chat import ChatCompletion
from redis import Redis as BlockingRedis

from penstock.gateway.keys.secrets import new_secret
from penstock.local.data_folder import DataFolder
from penstock.local.embedded import EmbeddedServer, find_servers
from tests.cli.cli_process import command, finish, start
from tests.support.patience import WAIT_S, eventually
from tests.support.processes import ended

pytestmark = pytest.mark.skipif(not find_servers(), reason="no Redis server at hand")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no model is named: penstock serve MODEL, or PENSTOCK_MODEL"),
        (["demo", "--api-key", "secret"], "--api-key: must be `new`, or a key of the form"),
        (["demo", "--redis-url", "redis://127.0.0.1:1", "--data-dir", "x"], "--data-dir is for a server of our own"),
        (["demo", "--dtype", "float31"], "--dtype: "),
    ],
)
def test_what_is_asked_for_wrongly_is_said_before_anything_starts(arguments: list[str], said: str) -> None:
    outcome = command("serve", "--port", "0", *arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith(f"penstock: {said}")


def test_a_port_that_is_taken_is_said_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = command("serve", "demo", "--port", str(port), "--data-dir", str(tmp_path / "not made"))
    assert outcome.status == 1
    assert outcome.err == f"penstock: cannot listen on 127.0.0.1 port {port}: Address already in use; set --port\n"
    assert not (tmp_path / "not made").exists()


def test_a_folder_that_another_process_serves_from_is_refused_by_name(tmp_path: Path) -> None:
    with DataFolder(tmp_path):
        outcome = command("serve", "demo", "--port", "0", "--data-dir", str(tmp_path))
    assert outcome.status == 1
    assert f"another process serves from {tmp_path} already" in outcome.err


def children_of(pid: int) -> dict[str, int]:
    """Returns the process ids of a process's children by a word of their command lines."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        line = Path(f"/proc/{child}/cmdline").read_bytes().decode()
        found.update({name: int(child) for name in ("gateway", "worker", "valkey") if name in line})
    return found


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@asynccontextmanager
async def serving(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Runs the command and yields its process, and what it printed once it was ready."""
    process = await start("serve", *arguments, stderr=asyncio.subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        said = await asyncio.wait_for(process.stdout.readuntil(b"Ctrl-C stops it.\n"), WAIT_S)
        yield process, said.decode()
    finally:
        await ended(process)


async def test_it_serves_until_ctrl_c_and_mends_what_dies(compile_cache: Path, tmp_path: Path) -> None:
    secret = new_secret()
    options = ("--port", "0", "--data-dir", str(tmp_path), "--compile-cache-dir", str(compile_cache))
    async with serving("demo", "--api-key", secret.text, *options) as (process, said):
        assert secret.text not in said
        asked = re.search(r'curl (http://\S+) -H "authorization: Bearer \$API_KEY" .* -d \'(.*)\'\n', said)
        redis_url = re.search(r"penstock top --redis-url (\S+)\n", said)
        assert asked
        assert redis_url
        owner = DataFolder(tmp_path).owner()
        assert owner is not None
        assert (owner.pid, owner.redis_url, asked[1]) == (process.pid, redis_url[1], f"{owner.url}/v1/chat/completions")

        async def answers() -> bool:
            """Asks where the gateway is now: on port 0, one that was started again has another one."""
            body, key = {**json.loads(asked[2]), "temperature": 0}, {"authorization": f"Bearer {secret.text}"}
            async with httpx.AsyncClient(timeout=WAIT_S) as client:
                answer = await client.post(asked[1], json=body, headers=key)
            content = ChatCompletion.model_validate_json(answer.text).choices[0].message.content
            return bool(content == "347 + 85 = 432")

        assert await answers()
        before = children_of(process.pid)
        os.kill(before["valkey"], signal.SIGKILL)
        await eventually(lambda: children_of(process.pid).get("valkey", 0) not in (0, before["valkey"]))
        assert await answers()
        process.send_signal(signal.SIGINT)
        assert (await finish(process)).status == 0
        assert not any(map(is_there, before.values()))
    with EmbeddedServer(data_dir=tmp_path / "redis") as server, BlockingRedis.from_url(server.url) as redis:
        assert redis.dbsize() > 0  # a restart goes on with it


async def test_a_worker_that_cannot_start_ends_all_of_it_with_its_status(tmp_path: Path) -> None:
    process = await start("serve", str(tmp_path / "nothing"), "--port", "0", "--data-dir", str(tmp_path / "data"))
    outcome = await finish(process)
    assert (outcome.status, outcome.out) == (2, "")
    said = f"--model {tmp_path / 'nothing'}: there is no directory"
    assert f"penstock: worker-1 ended with status 2 before it served: {said}" in outcome.err

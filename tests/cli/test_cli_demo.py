from __future__ import annotations

import asyncio
import re
import signal
import socket
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletion

from penstock.local.embedded import find_servers
from penstock.local.gateway_process import GatewayEnded, local_gateway
from tests.cli.cli_process import finish, penstock, start
from tests.support.patience import WAIT_S, eventually

pytestmark = pytest.mark.skipif(not find_servers(), reason="no Redis server at hand")


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def port_of(process: asyncio.subprocess.Process) -> int:
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), WAIT_S)).decode()
    found = re.search(r"redis://127\.0\.0\.1:(\d+)", line)
    assert found, line
    return int(found[1])


async def test_answers_and_leaves_nothing_behind(compile_cache: Path) -> None:
    outcome = await penstock("demo", "--compile-cache-dir", str(compile_cache))
    assert (outcome.status, outcome.err) == (0, "")
    assert "> What is 347 + 85?\n347 + 85 = 432\n" in outcome.out
    assert re.search(r"first token \d+\.\d s after the start", outcome.out)
    found = re.search(r"redis://127\.0\.0\.1:(\d+)", outcome.out)
    assert found
    assert not is_open(int(found[1]))
    asked = re.search(r"\n  curl http://127\.0\.0\.1:(\d+)/v1/chat/completions .*\n(.*)\n", outcome.out)
    assert asked
    completion = ChatCompletion.model_validate_json(asked[2], strict=True)
    assert completion.choices[0].message.content == "347 + 85 = 432"
    assert not is_open(int(asked[1]))


async def test_a_gateway_that_does_not_start_says_why() -> None:
    with pytest.raises(GatewayEnded, match=r"it said last: .*scheme 'http'"):
        async with local_gateway("http://127.0.0.1"):
            pass


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])
async def test_ending_it_ends_all_it_started(compile_cache: Path, number: signal.Signals, status: int) -> None:
    process = await start("demo", "--compile-cache-dir", str(compile_cache))
    port = await port_of(process)
    process.send_signal(number)
    outcome = await finish(process)  # its pipes end with the last process that holds them, the worker's too
    assert outcome.status == status
    await eventually(lambda: not is_open(port))

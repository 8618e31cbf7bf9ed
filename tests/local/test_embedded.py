"""The embedded server starts, stops, survives a restart, and does not outlive its owner."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from penstock.local.embedded import EmbeddedServer, EmbeddedServerError, find_servers
from tests.support.packages import ROOT
from tests.support.patience import eventually

pytestmark = [
    pytest.mark.skipif(not find_servers(), reason="no Redis server program is installed"),
    pytest.mark.every_server,
]


@pytest.mark.parametrize("program", find_servers().values(), ids=find_servers())
def test_each_program_serves_over_tcp_and_unix_socket_and_leaves_nothing(program: Path) -> None:
    with EmbeddedServer(program) as server:
        with redis.Redis.from_url(server.url) as over_tcp, redis.Redis.from_url(server.socket_url) as over_socket:
            over_tcp.set("key", "value")
            assert over_socket.get("key") == b"value"
            assert over_tcp.config_get("appendonly")["appendonly"] == "no"
        pid, scratch = server.pid, Path(server.socket_url.removeprefix("unix://")).parent
    assert not scratch.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_crash_with_a_data_dir_loses_nothing_and_keeps_the_port(tmp_path: Path) -> None:
    with EmbeddedServer(data_dir=tmp_path) as server:
        port = server.port
        with redis.Redis.from_url(server.url) as client:
            client.xadd("stream", {"a": "1"}, id="1-1")
        server.kill()
        server.start()
        assert server.port == port
        with redis.Redis.from_url(server.url) as client:
            assert client.xlen("stream") == 1


def test_what_is_wrong_with_the_server_is_told() -> None:
    with pytest.raises(EmbeddedServerError, match="no-such-option"):
        EmbeddedServer(arguments=("--no-such-option", "1")).start()
    with pytest.raises(EmbeddedServerError, match="ended with status"):
        EmbeddedServer(Path("/nonexistent/redis-server")).start()
    with pytest.raises(EmbeddedServerError, match="not started"):
        _ = EmbeddedServer().url


def test_starting_twice_is_an_error() -> None:
    with EmbeddedServer() as server, pytest.raises(EmbeddedServerError, match=str(server.pid)):
        server.start()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_the_server_dies_with_its_owner() -> None:
    code = "from penstock.local.embedded import *; s = EmbeddedServer().start(); print(s.pid, flush=True); input()"
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    with owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        os.kill(pid, 0)
        owner.send_signal(signal.SIGKILL)
    asyncio.run(eventually(lambda: not _runs(pid)))


def _runs(pid: int) -> bool:
    """Checks whether the process exists and is not a zombie that nobody waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

"""`penstock gateway` as people run it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from penstock.cli import run
from penstock.local.embedded import EmbeddedServer
from tests.cli.cli_process import finish, finish_by, penstock, start
from tests.support.patience import WAIT_S
from tests.support.processes import ended
from tests.support.programs.gateway_harness import Certificate

GATEWAY = ("gateway", "--port", "0", "--log-format", "json")


@pytest.fixture
def redis_url() -> Iterator[str]:
    """URL of one server, which is enough here: what depends on its kind is tested elsewhere."""
    with EmbeddedServer() as server:
        yield server.url


@dataclass
class Running:
    """The running command, and its log as far as it was read."""

    process: asyncio.subprocess.Process
    log: list[dict[str, Any]] = field(default_factory=list)

    async def until(self, event: str) -> dict[str, Any]:
        assert self.process.stderr is not None
        try:
            async with asyncio.timeout(WAIT_S):
                while not self.log or self.log[-1]["event"] != event:
                    line = await self.process.stderr.readline()
                    assert line, f"the gateway ended before {event!r}: {self.log}"
                    self.log.append(json.loads(line))
        except TimeoutError:
            raise AssertionError(f"no {event!r} within {WAIT_S:g} s: {self.log}\n{state_of(self.process)}") from None
        return self.log[-1]

    async def stop(self) -> int:
        """Stops the command; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return (await finish(self.process)).status


@asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[Running]:
    process = await start(*GATEWAY, *arguments)
    try:
        yield Running(process)
    finally:
        await ended(process)


async def is_alive(url: str, verify: ssl.SSLContext | bool = True) -> bool:
    async with httpx.AsyncClient(timeout=WAIT_S, verify=verify) as client:
        return bool((await client.get(f"{url}/liveness")).json() == {"alive": True})


def state_of(process: asyncio.subprocess.Process) -> str:
    """Returns the state of a process, with the signals that it blocks, ignores and catches."""
    return Path(f"/proc/{process.pid}/status").read_text()


def is_running(pid: int) -> bool:
    """Checks whether a process runs. One that has ended and was not waited for has no executable any more."""
    return Path(f"/proc/{pid}/exe").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_a_signal(redis_url: str, number: signal.Signals) -> None:
    async with running("--redis-url", redis_url, "--metrics-port", "0") as gateway:
        listening = await gateway.until("listening")
        assert await is_alive(listening["url"])
        async with httpx.AsyncClient(timeout=WAIT_S) as client:
            metrics = await client.get(f"{listening['metrics'][0]}/metrics")
        line = 'penstock_gateway_requests_total{method="GET",route="/liveness",status="200"} 1.0'
        assert line in metrics.text.splitlines()
        gateway.process.send_signal(number)
        outcome = await finish(gateway.process)
    assert (outcome.status, outcome.out) == (0, "")
    assert [json.loads(line)["event"] for line in outcome.err.splitlines()] == ["draining", "stopped"]


async def test_a_process_that_is_killed_is_replaced(redis_url: str) -> None:
    async with running("--redis-url", redis_url, "--workers", "2", "--metrics-port", "0") as gateway:
        listening = await gateway.until("listening")
        assert len(listening["metrics"]) == 2
        killed = (await gateway.until("process_started"))["pid"]
        os.kill(killed, signal.SIGKILL)
        ended = await gateway.until("process_ended")
        assert (ended["pid"], ended["exit_status"]) == (killed, -signal.SIGKILL)
        assert await is_alive(listening["url"])  # the other one answers meanwhile
        started = await gateway.until("process_started")
        assert started["place"] == ended["place"]
        assert await gateway.stop() == 0
    assert not is_running(started["pid"])


async def test_the_processes_end_with_the_one_that_started_them(redis_url: str) -> None:
    async with running("--redis-url", redis_url, "--workers", "2") as gateway:
        url = (await gateway.until("listening"))["url"]
        pids = [(await gateway.until("process_started"))["pid"]]
        gateway.log.clear()
        pids.append((await gateway.until("process_started"))["pid"])
        assert await is_alive(url)
        gateway.process.kill()
        # Its end closes what it writes to, and so does that of those it started, which have it too.
        await finish(gateway.process)
    assert not any(map(is_running, pids))


async def test_it_speaks_tls(redis_url: str, tmp_path: Path) -> None:
    certificate = Certificate.made_in(tmp_path)
    files = ("--tls-certificate", str(certificate.file), "--tls-key", str(certificate.key))
    async with running("--redis-url", redis_url, *files, "--header-timeout-s", "0.5") as gateway:
        url = (await gateway.until("listening"))["url"]
        assert url.startswith("https://")
        assert await is_alive(url, certificate.trusted())
        # Who never begins to speak it is not waited for.
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()
        assert await gateway.stop() == 0


async def test_a_certificate_that_was_renewed_is_read_again(redis_url: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("old", "new", "other")]
    for folder in folders:
        folder.mkdir()
    old, new, other = map(Certificate.made_in, folders)
    files = ("--tls-certificate", str(old.file), "--tls-key", str(old.key))
    async with running("--redis-url", redis_url, *files) as gateway:
        url = (await gateway.until("listening"))["url"]
        assert await is_alive(url, old.trusted())
        trusting_old, trusting_new = old.trusted(), new.trusted()
        other.file.replace(old.file)  # and not its key
        gateway.process.send_signal(signal.SIGHUP)
        assert (await gateway.until("certificate_refused"))["file"] == str(old.file)
        assert await is_alive(url, trusting_old)
        new.file.replace(old.file)
        new.key.replace(old.key)
        gateway.process.send_signal(signal.SIGHUP)
        await gateway.until("reloaded")
        assert await is_alive(url, trusting_new)
        with pytest.raises(httpx.ConnectError):
            await is_alive(url, trusting_old)
        assert await gateway.stop() == 0


async def test_an_address_that_others_reach_is_warned_of_while_there_are_no_keys(redis_url: str) -> None:
    async with running("--redis-url", redis_url, "--host", "0.0.0.0") as gateway:
        warning = await gateway.until("no_api_keys")
        assert (warning["level"], "penstock keys create" in warning["hint"]) == ("warning", True)
        assert await gateway.stop() == 0
    assert (await penstock("keys", "create", "--redis-url", redis_url)).status == 0
    async with running("--redis-url", redis_url, "--host", "0.0.0.0") as gateway:
        port = (await gateway.until("listening"))["url"].rpartition(":")[2]
        assert await is_alive(f"http://127.0.0.1:{port}")
        gateway.process.send_signal(signal.SIGTERM)
        assert "no_api_keys" not in (await finish(gateway.process)).err


async def test_a_port_that_is_taken_is_named(redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        outcome = await penstock("gateway", "--redis-url", redis_url, "--port", port)
        metrics = await penstock(*GATEWAY, "--redis-url", redis_url, "--metrics-port", port)
    assert (outcome.status, outcome.out) == (1, "")
    assert outcome.err.startswith(f"penstock: cannot listen on 127.0.0.1 port {port}: ")
    assert outcome.err.endswith("; set host or port\n")
    assert (metrics.status, metrics.err.endswith("; set host or metrics_port\n")) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--tls-key", "/no/key", "--tls-certificate", "/no/cert"], 2, "tls_certificate /no/cert and tls_key /no/key"),
        (["--tls-key", "/no/key"], 2, "tls_certificate is not set"),
        (["--host", "no such host"], 2, "--host: must be a host or an address, not 'no such host'"),
        (["--host", "192.0.2.1"], 1, "cannot listen on 192.0.2.1 port 0"),
    ],
)
async def test_what_it_cannot_serve_with_is_named(arguments: list[str], status: int, message: str) -> None:
    outcome = await penstock(*GATEWAY, *arguments)
    assert (outcome.status, message in outcome.err, "Traceback" in outcome.err) == (status, True, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cors-origins", "https://a.example,foo"], "--cors-origins: 'foo' is not an origin"),
        (["--cors-origins", "https://a.example/"], "scheme://host or scheme://host:port, or *"),
        (["--workers", "0"], "--workers: "),
        (["--redis-url", "http://x"], "--redis-url: the Redis URL has scheme 'http'"),
    ],
)
def test_wrong_settings_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*GATEWAY, *arguments]) == 2
    assert message in capsys.readouterr().err


async def test_a_second_signal_cuts_the_drain_short(redis_url: str) -> None:
    async with running("--redis-url", redis_url, "--drain-timeout-s", str(WAIT_S)) as gateway:
        port = int((await gateway.until("listening"))["url"].rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")  # without a body: it is open
        assert await is_alive(f"http://127.0.0.1:{port}")
        gateway.process.send_signal(signal.SIGTERM)
        await gateway.until("draining")
        outcome = await finish_by(gateway.process, signal.SIGTERM)
        writer.close()
    assert (outcome.status, "Traceback" in outcome.err) == (130, False)

"""Worker and gateway processes of two versions, and an update that replaces them one by one, as a Deployment does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from penstock.local.embedded import dies_with_parent
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.packages import PACKAGES, ROOT, process_path
from tests.support.patience import WAIT_S, eventually
from tests.support.processes import ended

HAND_BACK_S = 10  # what a program may take after its drain timeout
LAUNCHER = Path("tests/deploy/fleet_process.py")  # in a tree, for one whose modules lie elsewhere

CHANGES = {  # what a next version may add within version 1 of the wire, and send and write at once
    "requests.py": [
        (
            '    tenant: _Name | None = parameter("tenant")',
            '    hint: _Name | None = None\n    tenant: _Name | None = parameter("tenant")',
        ),
        ('{"request": self.model_dump_json(', '{"request": self.model_copy(update={"hint": "new"}).model_dump_json('),
    ],
    "replies.py": [
        ("    stop_string: str | None = None", '    hint: str | None = "new"\n    stop_string: str | None = None'),
        ("    turn: int | None = None", '    hint: str | None = "new"\n    turn: int | None = None'),
    ],
    "cards.py": [("    revision: str | None = None", '    hint: str | None = "new"\n    revision: str | None = None')],
}


def next_version(folder: Path) -> Path:
    """Makes a tree like this one, whose wire has more optional fields."""
    shutil.copytree(ROOT / "penstock", folder / "penstock", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "protocol", folder / "protocol", ignore=shutil.ignore_patterns("__pycache__"))
    for part in PACKAGES:
        if part != "protocol":
            (folder / part).symlink_to(ROOT / part)
    for name, edits in CHANGES.items():
        path = folder / "protocol/wire" / name
        text = path.read_text()
        for before, after in edits:
            assert text.count(before) == 1, f"{name} has no longer one {before!r}"
            text = text.replace(before, after)
        path.write_text(text)
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def environment(tree: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return {**kept, "PYTHONPATH": process_path(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def python_of(tree: Path) -> str:
    """Returns the Python that has the packages of a tree: its own one, if it was installed apart."""
    installed = tree / ".venv/bin/python"
    return str(installed) if tree != ROOT and installed.exists() else sys.executable


@dataclass
class Worker:
    name: str
    pid: int
    status: Path

    async def stop(self) -> None:
        """Sends SIGTERM, as Kubernetes does, and checks that the worker exits with 0."""
        os.kill(self.pid, signal.SIGTERM)
        await eventually(lambda: self.status.exists() and self.status.read_text())
        assert self.status.read_text() == "0"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


@dataclass
class Workers:
    """Workers of one version."""

    version: str
    redis: RedisClient
    url: str
    folder: Path
    launcher: asyncio.subprocess.Process
    heartbeat_ttl_s: float
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def start(self) -> Worker:
        """Returns once the worker is ready: it serves its queue."""
        name = f"{self.version}-{next(self._numbers)}"
        config = {
            "queue": "q", "name": name, "health_port": None, "block_ms": 100, "reclaim_interval_s": 0.1,
            "flush_interval_ms": 5, "drain_timeout_s": 0.2, "heartbeat_ttl_s": self.heartbeat_ttl_s,
        }  # fmt: skip
        status = self.folder / f"{name}.status"
        assert self.launcher.stdin is not None
        assert self.launcher.stdout is not None
        self.launcher.stdin.write(
            json.dumps({"url": self.url, "config": config, "status": str(status)}).encode() + b"\n"
        )
        pid = int(await asyncio.wait_for(self.launcher.stdout.readline(), WAIT_S))

        async def serves() -> bool:
            assert not status.exists(), status.read_text()
            return await self.redis.zscore(keys.serving("q"), name) is not None

        await eventually(serves)
        return Worker(name, pid, status)


@contextlib.asynccontextmanager
async def workers_of(
    version: str, tree: Path, redis: RedisClient, url: str, folder: Path, *, heartbeat_ttl_s: float = 60.0
) -> AsyncIterator[Workers]:
    launcher = await asyncio.create_subprocess_exec(
        *dies_with_parent(), python_of(tree), str((tree if (tree / LAUNCHER).exists() else ROOT) / LAUNCHER),
        env=environment(tree), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        yield Workers(version, redis, url, folder, launcher, heartbeat_ttl_s)
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)  # the workers too
        await launcher.wait()


@dataclass(eq=False)
class Gateway:
    port: int
    process: asyncio.subprocess.Process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def is_ready(self) -> bool:
        assert self.process.returncode is None
        with contextlib.suppress(httpx2.TransportError):
            async with httpx2.AsyncClient() as client:
                return (await client.get(f"{self.url}/readiness")).is_success
        return False

    async def stop(self) -> None:
        self.process.terminate()
        assert await asyncio.wait_for(self.process.wait(), WAIT_S) == 0


@dataclass
class Gateways:
    """Gateways of any version."""

    redis_url: str
    _started: list[Gateway] = field(default_factory=list)

    async def start(self, tree: Path) -> Gateway:
        """Returns once the gateway is ready."""
        port = free_port()
        process = await asyncio.create_subprocess_exec(
            *dies_with_parent(), python_of(tree), "-m", "penstock", "gateway", "--redis-url", self.redis_url,
            "--port", str(port), "--log-level", "warning", env=environment(tree), cwd=tree, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        gateway = Gateway(port, process)
        self._started.append(gateway)
        await eventually(gateway.is_ready)
        return gateway

    async def kill_all(self) -> None:
        for gateway in self._started:
            await ended(gateway.process)


@contextlib.asynccontextmanager
async def gateways_at(redis_url: str) -> AsyncIterator[Gateways]:
    """Kills at the end what still runs: a gateway that outlived its test would serve the next one's queues."""
    gateways = Gateways(redis_url)
    try:
        yield gateways
    finally:
        await gateways.kill_all()

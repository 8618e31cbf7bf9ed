"""Prometheus itself evaluates our dashboards and alerts: `make test-prometheus`, which needs `prometheus` and
`promtool`.

It scrapes a worker with the demo model, two with the fake engine of which one is killed, and a gateway, while requests
run. `test_dashboards_and_alerts.py` checks what needs no Prometheus.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml

from penstock.gateway.server import serving_metrics
from penstock.producer import AsyncClient
from penstock.protocol.tasks import end_tasks
from penstock.tools.chaos.process import ModelWorker
from tests.e2e.test_worker_health import http
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.gateway_harness import running_gateway
from tests.support.programs.worker_process import WorkerProcess
from tests.support.promql import RULES, expressions

pytestmark = pytest.mark.prometheus

HERE = Path(__file__).parent
WINDOW = "20s"  # in the place of Grafana's $__rate_interval
NOT_ON_CPU = "penstock_device_memory_"
SMALL = {"max_num_seqs": 8, "max_batch_tokens": 64, "num_pages": 520, "page_size": 16}


def program(name: str) -> str:
    """Returns the path of a program. Fails if it is missing: these tests are run to learn what Prometheus says."""
    path = shutil.which(name)
    assert path is not None, f"{name} is not installed; `apt install prometheus` has it"
    return path


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run([program("promtool"), *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_well_formed() -> None:
    assert "SUCCESS: 10 rules found" in promtool("check", "rules", *RULES)


def test_alerts_fire_when_they_should_and_not_before() -> None:
    assert "SUCCESS" in promtool("test", "rules", HERE / "alerts_test.yml")


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A Prometheus that scrapes."""

    url: str

    async def ask(self, path: str, **parameters: str) -> Any:
        async with httpx.AsyncClient(base_url=self.url, timeout=WAIT_S) as client:
            answer = await client.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, (parameters, answer.text)
        return answer.json()["data"]

    async def values(self, expression: str) -> list[float]:
        """Returns the values that are numbers."""
        found = (await self.ask("query", query=expression))["result"]
        return [value for value in (float(each["value"][1]) for each in found) if not math.isnan(value)]

    async def firing(self) -> set[tuple[str, str]]:
        """Returns firing alerts, by name and queue."""
        alerts = (await self.ask("alerts"))["alerts"]
        return {
            (each["labels"]["alertname"], each["labels"].get("queue", ""))
            for each in alerts
            if each["state"] == "firing"
        }


@asynccontextmanager
async def prometheus(folder: Path, targets: dict[str, list[int]]) -> AsyncIterator[Prometheus]:
    """Runs a Prometheus that scrapes these ports each second, by job, and has our rules."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in RULES],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
            for job, ports in targets.items()
        ],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    promtool("check", "config", path)
    flags = (f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={address}")
    with (folder / "prometheus.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(program("prometheus"), *flags, stdout=log, stderr=log)
    there = Prometheus(f"http://{address}")

    async def is_up() -> bool:
        assert process.returncode is None, (folder / "prometheus.log").read_text()
        with suppress(httpx.TransportError):
            async with httpx.AsyncClient(timeout=WAIT_S) as client:
                return (await client.get(f"{there.url}/-/ready")).status_code == 200
        return False

    try:
        await eventually(is_up)
        yield there
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def keep_asking(redis_url: str, gateway_url: str) -> None:
    """Makes some requests of every kind until it is cancelled. The demo model answers as it likes."""
    async with (
        httpx.AsyncClient(base_url=gateway_url, timeout=WAIT_S) as http_client,
        AsyncClient(redis_url, queue="fake") as fake,
        AsyncClient(redis_url, queue="demo") as demo,
    ):
        asked = {"model": "demo", "prompt": "Once upon a time there was", "max_tokens": 20}
        while True:
            await http_client.post("/v1/completions", json=asked)
            await http_client.post("/v1/completions", json={**asked, "prompt": 7})
            await http_client.post("/tokenize", json={"model": "demo", "prompt": "hi"})
            handles = [await demo.submit("a b c " * 20, max_tokens=12, regex="[a-c ]{8,}")]
            handles += [await fake.submit("x", max_tokens=5, priority=priority) for priority in (-1, 0, 1)]
            for handle in handles:
                await handle.result(WAIT_S)


async def test_every_expression_has_data_and_a_killed_worker_is_seen(
    redis_url: str, tmp_path: Path, compile_cache: Path
) -> None:
    """The queue `demo` has the demo model; `fake` has a worker that is killed, and one that finds the dead one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"model": "demo", "queue": "demo", "name": "demo", "health_host": "127.0.0.1", "health_port": port}
    demo = ModelWorker(redis_url, tmp_path / "demo", {**settings, **SMALL, "compile_cache_dir": compile_cache})
    fakes = {
        name: WorkerProcess(redis_url, tmp_path / name, name=name, queue="fake", health_host="127.0.0.1", health_port=0)
        for name in ("victim", "heir")
    }
    try:
        with fakes["victim"] as victim, fakes["heir"] as heir, socket.create_server(("127.0.0.1", 0)) as listener:
            ports = [port, *[await _port(each) for each in (victim, heir)]]
            await asyncio.gather(*(eventually(lambda each=each: _is_ready(each, demo)) for each in ports))
            async with running_gateway(redis_url) as gateway, serving_metrics(gateway.server, listener):
                targets = {"penstock-worker": ports, "penstock-gateway": [listener.getsockname()[1]]}
                async with prometheus(tmp_path, targets) as there:
                    asking = asyncio.create_task(keep_asking(redis_url, gateway.url))
                    try:
                        await _until_all_have_data(there, asking)
                        assert await there.firing() == set()
                    finally:
                        await end_tasks([asking])
                    await _kill_both(there, victim, heir)
    finally:
        demo.send(signal.SIGKILL)
        demo.wait(WAIT_S)


async def _until_all_have_data(there: Prometheus, asking: asyncio.Task[None]) -> None:
    """Waits until every expression of a dashboard has a number, and those of alerts can be evaluated."""
    missing: list[str] = []

    async def is_complete() -> bool:
        if asking.done():
            asking.result()
        missing.clear()
        for where, text in expressions():
            shown = _without_variables(text).removesuffix(" > 0")  # which leaves out what is well
            found = await there.values(shown)
            if ":" in where and not found and NOT_ON_CPU not in text:
                missing.append(f"{where}: {text}")
        return not missing

    try:
        await eventually(is_complete)
    except AssertionError:
        assert missing == []
        raise


def _without_variables(expression: str) -> str:
    """Replaces Grafana's variables by values, as Grafana would."""
    return expression.replace("$__rate_interval", WINDOW).replace("$queue", ".*").replace("$job", ".*")


async def _kill_both(there: Prometheus, victim: WorkerProcess, heir: WorkerProcess) -> None:
    victim.kill()
    lost = ("PenstockWorkerDead", "fake")
    await eventually(lambda: _fires(there, lost))
    assert await there.values('up{job=~"penstock.*"} == 0') == [0.0]
    [unserved] = [text for where, text in expressions() if where == "PenstockNoWorker"]
    assert await there.values(unserved) == []  # the heir serves
    heir.kill()
    await eventually(lambda: there.values(unserved))
    found = (await there.ask("query", query=unserved))["result"]
    assert [each["metric"] for each in found] == [{"queue": "fake"}]


async def _fires(there: Prometheus, alert: tuple[str, str]) -> bool:
    return alert in await there.firing()


async def _port(worker: WorkerProcess) -> int:
    def ports() -> list[int]:
        return [event["port"] for event in worker.events() if event["event"] == "health_listening"]

    await eventually(ports)
    return ports()[0]


async def _is_ready(port: int, demo: ModelWorker) -> bool:
    assert demo.poll() is None, "the worker with the demo model has ended"
    with suppress(OSError):
        return (await http(port, "/readyz"))[0] == 200
    return False

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis as BlockingRedis

from penstock.cli import run
from penstock.cli.shared.serve import _with_free_port
from penstock.engine.demo import MODEL_DIR
from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient
from penstock.worker.config import WorkerConfig
from tests.cli.cli_process import command, finish, finish_by, penstock, start
from tests.support.patience import WAIT_S


@pytest.fixture
def redis_url() -> Iterator[str]:
    """URL of one server, which is enough here: what depends on its kind is tested elsewhere."""
    with EmbeddedServer() as server:
        yield server.url


SMALL = (
    *("worker", "--model", "demo", "--max-num-seqs", "8", "--max-batch-tokens", "64", "--num-pages", "520"),
    *("--health-port", "0", "--drain-timeout-s", "20"),
)


async def read_until(process: asyncio.subprocess.Process, event: str) -> list[dict[str, object]]:
    """Returns the worker's log up to the first line of `event`."""
    assert process.stderr is not None
    lines: list[dict[str, object]] = []
    async with asyncio.timeout(WAIT_S):
        while not lines or lines[-1]["event"] != event:
            line = await process.stderr.readline()
            assert line, f"the worker ended before {event!r}: {lines}"
            lines.append(json.loads(line))
    return lines


async def test_serves_and_drains_on_sigterm(redis_url: str, compile_cache: Path) -> None:
    process = await start(*SMALL, "--redis-url", redis_url, "--compile-cache-dir", str(compile_cache))
    log = await read_until(process, "joined")
    assert [line["event"] for line in log if line.get("done")] == ["loading the model", "warming up"]
    async with AsyncClient(redis_url) as client, client.stream("Count from 1 to 999.", max_tokens=400) as chunks:
        await anext(chunks)
        process.send_signal(signal.SIGTERM)
        reply = await chunks.read_to_end()
    outcome = await finish(process)
    assert (outcome.status, outcome.out) == (0, "")
    assert reply.finish_reason in ("stop", "length")
    assert json.loads(outcome.err.splitlines()[-1])["event"] == "drained"
    assert "Count from" not in outcome.err


async def test_a_signal_during_the_start_ends_it(redis_url: str) -> None:
    process = await start(*SMALL, "--redis-url", redis_url, "--compile-cache-dir", "none")
    await read_until(process, "warming up")
    process.send_signal(signal.SIGTERM)
    outcome = await finish(process)
    assert outcome.status == 0
    assert "Traceback" not in outcome.err


async def test_a_second_signal_aborts(redis_url: str, compile_cache: Path) -> None:
    process = await start(*SMALL, "--redis-url", redis_url, "--compile-cache-dir", str(compile_cache))
    await read_until(process, "joined")
    async with AsyncClient(redis_url) as client:
        handle = await client.submit("Once upon a time", max_tokens=900, ignore_eos=True)
        await anext(handle.stream())
        with BlockingRedis.from_url(redis_url, protocol=2) as server:
            server.client_pause(int(WAIT_S * 1000), all=False)  # a drain ends with writes: this one with the pause
            process.send_signal(signal.SIGINT)
            await read_until(process, "draining")
            outcome = await finish_by(process, signal.SIGINT)
            server.client_unpause()
    assert outcome.status == 130
    last = json.loads(outcome.err.splitlines()[-1])
    assert (last["event"], last["level"], last["exit_status"]) == ("worker_failed", "critical", 130)
    assert last["error"].startswith("stopped at once, as it was told to stop a second time")


async def test_a_drain_leaves_no_rendering_process_behind(redis_url: str, compile_cache: Path, tmp_path: Path) -> None:
    shutil.copytree(MODEL_DIR, tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template.write_text("{% if messages[0].content == 'loop' %}" + loop + "{% endif %}" + template.read_text())
    process = await start(
        *SMALL, "--model", str(tmp_path / "model"), "--redis-url", redis_url, "--compile-cache-dir", str(compile_cache)
    )
    await read_until(process, "joined")
    async with AsyncClient(redis_url) as client:
        assert await client.generate([{"role": "user", "content": "Hello"}], max_tokens=5)
        rendering = children(process.pid)
        assert rendering
        await client.submit([{"role": "user", "content": "loop"}])
        await client.generate("Once", max_tokens=5)  # so that it is taken
        process.send_signal(signal.SIGTERM)
    outcome = await finish(process)
    assert (outcome.status, outcome.out) == (0, "")
    assert "Traceback" not in outcome.err
    assert not is_any_left(rendering)


def is_any_left(pids: list[int]) -> bool:
    return any(Path(f"/proc/{pid}").exists() for pid in pids)


def children(pid: int) -> list[int]:
    return [int(pid) for file in Path(f"/proc/{pid}/task").glob("*/children") for pid in file.read_text().split()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model is set: give --model or PENSTOCK_MODEL"),
        (["--model", "demo", "--max-batch-tokens", "100"], "--max-batch-tokens: must be a power of two from 16"),
        (["--model", "demo", "--max-attempts", "0"], "--max-attempts: must be above 0, not 0"),
        (["--model", "demo", "--redis-url", "http://x"], "--redis-url: the Redis URL has scheme 'http'"),
    ],
)
def test_wrong_settings_exit_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PENSTOCK_MODEL", raising=False)
    assert run(["worker", "--log-format", "console", *arguments]) == 2
    assert message in capsys.readouterr().err


WORKER = ("worker", "--log-format", "console")  # where a log's lines go is settled once per process
LLAMA = {
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 8,
}


def test_a_path_without_a_model_is_refused_before_redis() -> None:
    outcome = command(*WORKER, "--model", "/no/such/folder", "--redis-url", "redis://nobody.invalid")
    assert outcome.status == 2
    assert outcome.err.startswith("penstock: --model /no/such/folder: there is no directory /no/such/folder")
    assert len(outcome.err.splitlines()) == 1


async def test_a_model_that_cannot_be_loaded_exits_4(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    outcome = await penstock("worker", "--model", str(tmp_path), "--health-port", "0", REDIS_URL=redis_url)
    assert outcome.status == 4
    assert "the model could not be loaded: config.json: num_hidden_layers" in outcome.err.splitlines()[-1]
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("content", "message", "status"),
    [
        (
            json.dumps({**LLAMA, "num_hidden_layers": 10**9}),
            "num_hidden_layers must be at most 1024",
            4,
        ),
        ("[" * 10**6, "config.json is not readable as JSON: it is nested too deep", 2),
        (None, "config.json is a FIFO, not a regular file", 2),
    ],
)
def test_a_hostile_config_ends_it(
    redis_url: str, tmp_path: Path, content: str | None, message: str, status: int
) -> None:
    path = tmp_path / "config.json"
    os.mkfifo(path) if content is None else path.write_text(content)
    outcome = command(*WORKER, "--model", str(tmp_path), "--health-port", "0", REDIS_URL=redis_url)
    assert outcome.status == status
    assert message in outcome.err.splitlines()[-1]
    assert "Traceback" not in outcome.err


def test_a_taken_health_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        outcome = command(*WORKER, "--model", "demo", "--health-host", "127.0.0.1", "--health-port", port)
    assert outcome.status == 1
    assert "set --health-port or --health-host" in outcome.err.splitlines()[-1]


def test_a_health_host_that_is_none_is_named() -> None:
    outcome = command(*WORKER, "--model", "demo", "--health-host", "no such host")
    assert (outcome.status, outcome.err) == (2, "penstock: --health-host: must be an address, not 'no such host'\n")
    outcome = command(*WORKER, "--model", "demo", "--health-host", "192.0.2.1")
    assert outcome.status == 1
    assert "set --health-port or --health-host" in outcome.err.splitlines()[-1]
    assert "Traceback" not in outcome.err


def test_a_second_worker_finds_another_health_port_unless_one_is_set() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = WorkerConfig(health_port=taken.getsockname()[1])
        assert _with_free_port(config, is_set=False).health_port == 0
        assert _with_free_port(config, is_set=True) is config
    assert _with_free_port(config, is_set=False) is config

"""The health port and the logs of a running worker."""

from __future__ import annotations

import asyncio
import io
import json
import resource
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine, fake_model
from penstock.worker.config import WorkerConfig
from penstock.worker.logs import configure_logs
from penstock.worker.service import Model, Say, WorkerService
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import QUICK, is_queue_empty, read_reply, read_until, running_worker, send
from tests.support.programs.worker_process import WorkerProcess
from tests.support.scrapes import scraped

pytestmark = pytest.mark.usefixtures("patient_scrapes")


async def http(port: int | None, path: str, method: str = "GET") -> tuple[int, str]:
    assert port is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body


async def get_metrics(port: int | None) -> dict[str, float]:
    status, body = await http(port, "/metrics")
    assert status == 200
    return scraped(body)


@pytest.fixture
def logs() -> io.StringIO:
    stream = io.StringIO()
    configure_logs("debug", "json", stream)
    return stream


async def test_health_follows_the_worker_s_life(redis_url: str, redis: RedisClient) -> None:
    may_load = threading.Semaphore(0)
    phases = ["loading the model: 0.4/1.2 GB", "warming up", "warming up: 12/40 shapes"]
    engine = FakeEngine(step_s=0.002)

    def load(say: Say) -> Model:
        for phase in phases:
            say(phase)
            may_load.acquire()
        return fake_model(engine)

    service = WorkerService(WorkerConfig(**{**QUICK, "health_host": "127.0.0.1", "health_port": 0}), redis_url, load)
    task = asyncio.create_task(service.run())
    await eventually(lambda: service.health_port)
    port = service.health_port
    assert await http(port, "/healthz") == (200, '{"alive": true}')
    for phase in phases:
        await eventually(lambda phase=phase: service.readiness.reasons == {"service": phase})
        assert await http(port, "/readyz") == (503, json.dumps({"ready": False, "reasons": {"service": phase}}))
        may_load.release()
    await eventually(lambda: service.readiness.is_ready)
    assert await http(port, "/readyz") == (200, '{"ready": true, "reasons": {}}')
    assert (await http(port, "/readyz", "HEAD"))[0] == 200
    assert (await http(port, "/readyz", "POST"))[0] == 405
    assert (await http(port, "/"))[0] == 404
    await send(redis, prompt="x", id="x", max_tokens=10**6)
    await read_until(redis, "x", lambda entry: entry.type == "chunk")
    service.request_drain()
    assert await http(port, "/readyz") == (503, '{"ready": false, "reasons": {"service": "draining"}}')
    assert (await http(port, "/healthz"))[0] == 200
    await redis.set(keys.cancel("q", "x"), 1)
    await task


async def test_metrics(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine(max_num_seqs=2)
    async with running_worker(redis_url, engine, health_host="127.0.0.1", health_port=0) as worker:
        port = worker.service.health_port
        before = await get_metrics(port)
        assert before['penstock_requests_total{finish_reason="length"}'] == 0
        assert before['penstock_dropped_requests_total{reason="fenced"}'] == 0
        assert before["penstock_engine_compiles_after_warmup_total"] == 0
        assert before["penstock_time_to_first_token_seconds_count"] == 0
        await send(redis, prompt="x", id="x", max_tokens=5)
        await read_reply(redis, "x")
        await eventually(lambda: is_queue_empty(redis))
        engine.hold()
        for i in range(5):
            await send(redis, prompt="x", id=f"x{i}", max_tokens=5)
        await eventually(lambda: len(engine.prefilled) == 3)

        async def is_measured() -> bool:
            return (await get_metrics(port))["penstock_queue_length"] == 5

        await eventually(is_measured)  # once a second
        during = await get_metrics(port)
        engine.allow()
        await read_reply(redis, "x4")
    assert during['penstock_requests_total{finish_reason="length"}'] == 1
    assert during["penstock_time_to_first_token_seconds_count"] == 1
    assert during["penstock_engine_generated_tokens_total"] == 5
    assert (during["penstock_ready"], during["penstock_live_requests"]) == (1, 2)
    assert (during["penstock_queue_length"], during["penstock_queue_pending"], during["penstock_queue_lag"]) == (
        5,
        2,
        3,
    )


async def test_one_line_per_request_and_never_its_text(redis_url: str, redis: RedisClient, logs: io.StringIO) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with running_worker(redis_url, FakeEngine(max_model_len=100)):
        await send(redis, prompt="SECRET words", id="good", max_tokens=5, traceparent=trace, tenant="acme")
        await send(redis, prompt="SECRET words", id="bad", SECRET="SECRET")
        await send(redis, prompt="SECRET" * 100, id="long")
        replies = {name: await read_reply(redis, name) for name in ("good", "bad", "long")}
        await eventually(lambda: is_queue_empty(redis))
    lines = [json.loads(line) for line in logs.getvalue().splitlines()]
    ends = {line["request_id"]: line for line in lines if line["event"] == "request_ended"}
    assert set(ends) == {"good", "bad", "long"}
    assert (ends["good"]["traceparent"], ends["good"]["tenant"]) == (trace, "acme")
    assert ends["good"]["completion_tokens"] == 5
    assert await redis.hget(keys.state("q", "good"), "tenant") == "acme"
    assert ends["good"]["total_ms"] == replies["good"].end.total_ms
    assert ends["bad"]["code"] == "invalid_request"
    assert "SECRET" not in logs.getvalue()
    assert replies["good"].text().split()[0] not in logs.getvalue()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Raises the descriptor limit for the connections that a test holds itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def keep_connecting(port: int, *, num_held: int, has_all: asyncio.Event) -> None:
    """Opens silent connections; once there are `num_held`, a new one replaces the oldest."""
    loop = asyncio.get_running_loop()
    held: deque[socket.socket] = deque()
    try:
        while True:
            if len(held) == num_held:
                has_all.set()
                held.popleft().close()
            held.append(socket.socket())
            held[-1].setblocking(False)
            await loop.sock_connect(held[-1], ("127.0.0.1", port))
    finally:
        for connection in held:
            connection.close()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit, of Linux, to bound another process")
@pytest.mark.usefixtures("many_descriptors")
async def test_idle_connections_cannot_stop_a_worker(redis_url: str, redis: RedisClient, tmp_path: Path) -> None:
    options: dict[str, Any] = {"health_host": "127.0.0.1", "health_port": 0, "heartbeat_ttl_s": WAIT_S}
    with WorkerProcess(redis_url, tmp_path / "log", name="w", **options) as process:
        await eventually(lambda: any(event["event"] == "joined" for event in process.events()))
        port = next(event["port"] for event in process.events() if event["event"] == "health_listening")
        process.limit_descriptors(400)
        has_all = asyncio.Event()
        stranger = asyncio.create_task(keep_connecting(port, num_held=1200, has_all=has_all))
        await asyncio.wait_for(has_all.wait(), WAIT_S)
        for i in range(5):
            await send(redis, prompt="x", id=f"x{i}", max_tokens=50)
            assert (await read_reply(redis, f"x{i}")).end.completion_tokens == 50
            assert await http(port, "/readyz") == (200, '{"ready": true, "reasons": {}}')
            assert (await http(port, "/metrics"))[0] == 200
        stranger.cancel()
        await asyncio.wait({stranger})
        process.send(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    assert "Traceback" not in process.log()
    assert {event["event"] for event in process.events()} >= {"joined", "drained"}
    assert not [event for event in process.events() if event["level"] in ("warning", "error")]


async def test_scrapes_at_the_same_time_share_one_connection(redis_url: str, redis: RedisClient) -> None:
    async with running_worker(redis_url, name="w", health_host="127.0.0.1", health_port=0) as worker:
        port = worker.service.health_port
        await get_metrics(port)
        before = await num_connections(redis, "w")
        await redis.config_resetstat()
        pages = await asyncio.gather(*(http(port, "/metrics") for _ in range(40)))
        assert {status for status, _ in pages} == {200}
        assert await num_connections(redis, "w") < before + 5  # one, and what the worker's own tasks want just then
        scrapes = (await redis.info("commandstats"))["cmdstat_xlen"]["calls"] / 2  # the dead letters, of two kinds
        assert scrapes < 40
        assert scraped(pages[0][1])["penstock_queue_length"] == 0


async def test_scrapes_of_all_workers_cost_one_list_of_them_a_second(redis_url: str, redis: RedisClient) -> None:
    """The list has a line for each worker: if each asked for it at each scrape, the cost would be quadratic."""
    options: dict[str, Any] = {"health_host": "127.0.0.1", "health_port": 0}
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(running_worker(redis_url, **options)) for _ in range(4)]
        async with redis.monitor() as monitor:  # type: ignore[union-attr]
            begun_s = time.monotonic()
            for _ in range(20):
                pages = await asyncio.gather(*(get_metrics(worker.service.health_port) for worker in workers))
            await redis.echo("scraped")
            took_s = time.monotonic() - begun_s
            said = [told async for told in until_echo(monitor)]
    assert {page["penstock_queue_length"] for page in pages} == {0}
    load = keys.load("q")
    looks = [client for client, command in said if command.startswith(f"HSET {load} at_ms")]
    lists = [client for client, command in said if command == f"XPENDING {keys.requests('q')} {keys.GROUP}"]
    scrapes = [client for client, command in said if command == f"HGETALL {load}"]
    assert len(scrapes) >= 20
    assert "lua" not in scrapes
    assert lists == looks == ["lua"] * len(looks)
    assert len(looks) <= 1.01 * took_s + 1  # a second of the server is one of whole milliseconds


async def until_echo(monitor: Any) -> AsyncIterator[tuple[str, str]]:
    """Yields who sent each command (a connection or a script), and the command."""
    async with asyncio.timeout(WAIT_S):
        async for told in monitor.listen():
            if told["command"].startswith("ECHO"):
                return
            yield told["client_type"], told["command"]


async def num_connections(redis: RedisClient, worker: str) -> int:
    return sum(client["name"] == f"penstock-worker-{worker}" for client in await redis.client_list())


async def test_taken_health_port_is_an_error(redis_url: str) -> None:
    async with running_worker(redis_url, health_host="127.0.0.1", health_port=0) as worker:
        options = {**QUICK, "health_host": "127.0.0.1", "health_port": worker.service.health_port}
        with pytest.raises(OSError, match="in use"):
            await WorkerService(WorkerConfig(**options), redis_url, lambda _: fake_model()).run()

"""Before its model is loaded, a worker finds out what would keep it from serving."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import fake_model
from penstock.worker.config import WorkerConfig
from penstock.worker.errors import NameTaken, RedisRefused
from penstock.worker.service import Model, Say, WorkerService
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import QUICK, running_worker


class Loader:
    """Loads when it may, and records whether it was asked to."""

    def __init__(self) -> None:
        self.is_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, _: Say) -> Model:
        self.is_begun.set()
        self.may_end.wait(WAIT_S)
        return fake_model()


def service_at(url: str, load: Loader, **options: Any) -> WorkerService:
    return WorkerService(WorkerConfig(**{**QUICK, **options}), url, load)


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ("nobody:wrong@", "check user and password in --redis-url"),
        (":needless@", "the server wants no password"),
    ],
)
async def test_a_wrong_password_ends_it_before_the_model_is_loaded(redis_url: str, user: str, message: str) -> None:
    load = Loader()
    with pytest.raises(RedisRefused, match=message):
        await asyncio.wait_for(service_at(redis_url.replace("://", f"://{user}"), load).run(), WAIT_S)
    assert not load.is_begun.is_set()


async def test_so_does_a_wrong_password_of_a_cluster(redis_cluster_url: str) -> None:
    load = Loader()
    with pytest.raises(RedisRefused, match="check user and password"):
        await asyncio.wait_for(service_at(redis_cluster_url.replace("://", "://no:wrong@"), load).run(), WAIT_S)
    assert not load.is_begun.is_set()


async def test_so_does_a_missing_permission(redis_url: str, redis: RedisClient) -> None:
    await redis.execute_command("ACL", "SETUSER", "some", "on", ">secret", "~*", "+@all", "-xack")
    load = Loader()
    try:
        with pytest.raises(RedisRefused, match=r"XACK on penstock:\{q\}:requests"):
            await asyncio.wait_for(service_at(redis_url.replace("://", "://some:secret@"), load).run(), WAIT_S)
    finally:
        await redis.execute_command("ACL", "DELUSER", "some")
    assert not load.is_begun.is_set()


async def test_so_does_a_taken_name_be_it_of_a_worker_that_serves_or_of_one_that_loads(redis_url: str) -> None:
    load = Loader()
    async with running_worker(redis_url, name="same"):
        with pytest.raises(NameTaken):
            await asyncio.wait_for(service_at(redis_url, load, name="same").run(), WAIT_S)
    first = service_at(redis_url, Loader(), name="same")
    loading = asyncio.create_task(first.run())
    await eventually(lambda: first.readiness.reasons == {"service": "loading the model"})
    with pytest.raises(NameTaken):
        await asyncio.wait_for(service_at(redis_url, load, name="same").run(), WAIT_S)
    assert not load.is_begun.is_set()
    first.request_drain()
    await asyncio.wait_for(loading, WAIT_S)


async def test_a_name_that_is_lost_while_the_model_is_loaded_ends_it(redis_url: str, redis: RedisClient) -> None:
    service = service_at(redis_url, Loader(), name="same", heartbeat_ttl_s=0.3)
    running = asyncio.create_task(service.run())
    await eventually(lambda: service.readiness.reasons == {"service": "loading the model"})

    async def is_told() -> bool:
        await redis.set(keys.starting("q", "same"), "another", px=10_000)
        return running.done()

    await eventually(is_told)
    with pytest.raises(NameTaken):
        await running


async def test_it_does_not_count_as_a_worker_while_it_loads(redis_url: str, redis: RedisClient) -> None:
    load = Loader()
    service = service_at(redis_url, load, name="slow")
    running = asyncio.create_task(service.run())
    await eventually(lambda: redis.exists(keys.starting("q", "slow")))
    await eventually(load.is_begun.is_set)
    assert not await redis.exists(keys.heartbeat("q", "slow"), keys.serving("q"))
    load.may_end.set()
    await eventually(lambda: service.readiness.is_ready)
    assert await redis.exists(keys.heartbeat("q", "slow"))
    assert not await redis.exists(keys.starting("q", "slow"))
    service.request_drain()
    await asyncio.wait_for(running, WAIT_S)


async def test_a_redis_that_is_not_there_is_one_line_until_it_is_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    load = Loader()
    load.may_end.set()
    service = service_at(f"redis://127.0.0.1:{port}", load)
    with capture_logs() as lines:
        running = asyncio.create_task(service.run())
        await eventually(lambda: service.readiness.reasons.keys() == {"service", "redis"})
        assert service.readiness.reasons["service"] == "looking for Redis"
        assert not load.is_begun.is_set()
        with EmbeddedServer(port=port):
            await eventually(lambda: service.readiness.is_ready)
            service.request_drain()
            await asyncio.wait_for(running, WAIT_S)
    told = [line["event"] for line in lines if line["event"].startswith("redis_")]
    assert told == ["redis_unavailable", "redis_back"]
    first = next(line for line in lines if line["event"] == "redis_unavailable")
    assert (first["redis"], "redis-server" in first["hint"]) == (f"redis://127.0.0.1:{port}/0", True)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "redis+cluster://127.0.0.1:1"])
async def test_told_to_stop_it_stops_looking_for_redis(url: str) -> None:
    service = service_at(url, Loader())
    running = asyncio.create_task(service.run())
    await eventually(lambda: "redis" in service.readiness.reasons)
    service.request_drain()
    await asyncio.wait_for(running, WAIT_S)

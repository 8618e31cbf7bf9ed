"""Workers come and go by KEDA's arithmetic, over the figures of a real server and real workers."""

from __future__ import annotations

import math
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from penstock.producer import AsyncClient, QueueFull
from penstock.protocol import keys
from penstock.protocol.queue.load import QueueLoad, query_load
from penstock.protocol.redis.connection import RedisClient, ensure_group
from penstock.tools.chaos.fake_engine import FakeEngine
from penstock.worker.intake import measuring
from tests.e2e.test_worker_health import get_metrics
from tests.support.packages import ROOT
from tests.support.patience import eventually
from tests.support.programs.worker_harness import Running, is_queue_empty, running_worker, send

pytestmark = pytest.mark.usefixtures("patient_scrapes")

MANIFEST = ROOT / "deploy/kubernetes/components/keda/scaling.yaml"
DOCS = ROOT / "docs"
TOLERANCE = 0.1  # by Kubernetes, a ratio this near to 1 changes nothing
REQUESTS, TOKENS = 200, 20


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MEASURE_INTERVAL_S", 0.1)


@dataclass(frozen=True)
class Reading:
    """Reading of one trigger of a ScaledObject."""

    value: float
    target: float
    activation: float


@dataclass
class Keda:
    """Does what KEDA and its HPA do, without the pauses between two steps.

    KEDA alone goes from 0 to 1 once any trigger is above its activation value, and back once none is. In between, an
    HPA with all triggers takes the largest number that any of them asks for: value over target, rounded up
    (AverageValue).
    """

    redis: RedisClient
    spec: dict[str, Any]
    workers: list[Running] = field(default_factory=list)
    replicas: int = 0

    async def step(self) -> int:
        readings = [await self._read(trigger["type"], trigger["metadata"]) for trigger in self.spec["triggers"]]
        least, most = self.spec["minReplicaCount"], self.spec["maxReplicaCount"]
        is_active = any(reading.value > reading.activation for reading in readings)
        if self.replicas == 0:
            self.replicas = max(1, least) if is_active else least
        elif not is_active and least == 0:
            self.replicas = 0
        else:
            wanted = max(self._asked(reading) for reading in readings)
            self.replicas = max(1, least, min(most, wanted, max(2 * self.replicas, self.replicas + 4)))
        return self.replicas

    def _asked(self, reading: Reading) -> int:
        if abs(reading.value / (reading.target * self.replicas) - 1) <= TOLERANCE:
            return self.replicas
        return math.ceil(reading.value / reading.target)

    async def _read(self, kind: str, metadata: dict[str, str]) -> Reading:
        if kind == "prometheus":
            name = re.fullmatch(r"max\((\w+)\{.*\}\)", metadata["query"])
            assert name is not None
            assert metadata["ignoreNullValues"] == "true"
            pages = [await get_metrics(worker.service.health_port) for worker in self.workers]
            value = max((page[name[1]] for page in pages), default=0)
            return Reading(value, float(metadata["threshold"]), float(metadata["activationThreshold"]))
        stream = metadata["stream"].replace("{default}", "{q}")
        activation = float(metadata.get("activationLagCount", 0))
        if "consumerGroup" not in metadata:
            return Reading(await self.redis.xlen(stream), float(metadata["streamLength"]), activation)
        if "lagCount" in metadata:
            groups: Any = await self.redis.xinfo_groups(stream)
            lag = next(group["lag"] for group in groups if group["name"] == metadata["consumerGroup"])
            return Reading(lag or 0, float(metadata["lagCount"]), activation)
        pending: Any = await self.redis.xpending(stream, metadata["consumerGroup"])
        return Reading(pending["pending"], float(metadata["pendingEntriesCount"]), activation)


def manifest() -> dict[str, Any]:
    documents = list(yaml.safe_load_all(MANIFEST.read_text()))
    assert [each["kind"] for each in documents] == ["TriggerAuthentication", "ScaledObject"]
    spec: dict[str, Any] = documents[1]["spec"]
    return spec


def streams(**metadata: str) -> dict[str, Any]:
    trigger = {"type": "redis-streams", "metadata": {"stream": "penstock:{default}:requests", **metadata}}
    return {"minReplicaCount": 0, "maxReplicaCount": 8, "triggers": [trigger]}


async def numbers(redis: RedisClient) -> QueueLoad:
    return await query_load(redis.execute_command, "q") or QueueLoad()


async def test_from_none_to_many_and_back(redis_url: str, redis: RedisClient, raw: RedisClient) -> None:
    keda = Keda(redis, manifest())
    await ensure_group(redis, "q")
    assert await keda.step() == 0

    async with AsyncExitStack() as fleet:

        async def scale() -> int:
            while len(keda.workers) > keda.replicas:
                await keda.workers.pop().drain()
            for _ in range(keda.replicas - len(keda.workers)):
                engine = FakeEngine(max_num_seqs=2, step_s=0.01)
                options: dict[str, Any] = {"health_host": "127.0.0.1", "health_port": 0, "target_wait_s": 3.0}
                keda.workers.append(await fleet.enter_async_context(running_worker(redis_url, engine, **options)))
            return keda.replicas

        for number in range(REQUESTS):
            await send(redis, prompt="x" * 10, max_tokens=TOKENS, priority=number % 2)
        assert await keda.step() == 1  # nobody has read anything: what is in the stream says so
        await scale()

        async def is_measured() -> bool:
            return (await numbers(raw)).wanted_workers > 2

        await eventually(is_measured)
        found = await numbers(raw)
        assert {band.priority for band in found.bands} <= {0, 1}
        assert found.tokens_per_s < 1000  # two at once, 100 steps a second at most
        assert await keda.step() > 2
        assert await scale() == len(keda.workers) <= 8

        await eventually(lambda: is_queue_empty(redis))

        async def is_idle() -> bool:
            return (await numbers(raw)).wanted_workers == 0

        await eventually(is_idle)
        assert (await numbers(raw)).num_waiting == 0
        assert await keda.step() == 0
        await scale()
        assert not await redis.exists(keys.serving("q"))

        await send(redis, prompt="x", max_tokens=TOKENS)
        assert await keda.step() == 1
        await scale()
        await eventually(lambda: is_queue_empty(redis))


async def test_what_was_read_and_left_behind_starts_a_worker(redis_url: str, redis: RedisClient) -> None:
    """The workers died. Entries with a place are pending: lag does not count them, the stream's length does."""
    engine = FakeEngine(max_num_seqs=1)
    engine.hold()
    async with running_worker(redis_url, engine, drain_timeout_s=0.05) as worker:
        for _ in range(5):
            await send(redis, prompt="x", max_tokens=5)
        await eventually(lambda: _has_place(redis, 4))
        lag = Keda(redis, streams(consumerGroup=keys.GROUP, lagCount="5", activationLagCount="0"), replicas=1)
        assert await lag.step() == 0  # with a worker that has a backlog of 4, and afterwards without one:
        await worker.drain()
    assert await lag.step() == 0
    pending = Keda(redis, streams(consumerGroup=keys.GROUP, pendingEntriesCount="5"))
    assert await pending.step() == 1
    assert await Keda(redis, manifest()).step() == 1


async def test_pending_sees_nothing_of_what_is_new(redis: RedisClient) -> None:
    await ensure_group(redis, "q")
    await send(redis, prompt="x")
    assert await Keda(redis, streams(consumerGroup=keys.GROUP, pendingEntriesCount="5")).step() == 0
    assert await Keda(redis, streams(consumerGroup=keys.GROUP, lagCount="5", activationLagCount="0")).step() == 1
    assert await Keda(redis, streams(streamLength="5")).step() == 1


@pytest.mark.parametrize(
    ("replicas", "value", "expected"), [(1, 1, 1), (1, 2, 2), (2, 7, 6), (4, 9, 8), (8, 3, 3), (8, 0, 1), (10, 11, 8)]
)
async def test_the_arithmetic(redis: RedisClient, replicas: int, value: float, expected: int) -> None:
    """Kubernetes documents this for its defaults: a step goes to at most 4 replicas or twice as many."""
    await redis.xadd(keys.requests("q"), {"prompt": "x"})
    keda = Keda(redis, {**streams(streamLength="1000000"), "maxReplicaCount": 8}, replicas=replicas)
    asked = Reading(value, target=1, activation=0)
    assert keda._asked(asked) == (replicas if abs(value / replicas - 1) <= TOLERANCE else value)
    keda.spec["triggers"].append({"type": "redis-streams", "metadata": {"stream": "more", "streamLength": "1"}})
    for _ in range(round(value)):
        await redis.xadd("more", {"prompt": "x"})
    assert await keda.step() == expected


async def _has_place(redis: RedisClient, count: int) -> bool:
    pending: Any = await redis.xpending(keys.requests("q"), keys.GROUP)
    return {each["name"]: each["pending"] for each in pending["consumers"]}.get(keys.WAITING) == count


async def test_metrics_have_the_numbers(redis_url: str, redis: RedisClient, raw: RedisClient) -> None:
    engine = FakeEngine(max_num_seqs=1)
    async with running_worker(redis_url, engine, health_host="127.0.0.1", health_port=0) as worker:
        await send(redis, prompt="x" * 50, max_tokens=12, priority=0)
        await eventually(lambda: is_queue_empty(redis))
        engine.hold()
        for priority in (0, 0, 0, 7, -2):
            await send(redis, prompt="x" * 50, max_tokens=12, priority=priority)
        await eventually(lambda: _waits(raw, 4))
        found = await get_metrics(worker.service.health_port)
        load = await numbers(raw)
        engine.allow()
        await eventually(lambda: is_queue_empty(redis))
        await eventually(lambda: _waits(raw, 0))
        after = await get_metrics(worker.service.health_port)
    assert (load.num_running, load.num_workers) == (1, 1)
    requests = {band.priority: band.num_requests for band in load.bands}
    assert sum(requests.values()) == 4
    for band in load.bands:
        label = f'{{priority="{band.priority}"}}'
        assert found[f"penstock_waiting_requests{label}"] == band.num_requests
        assert found[f"penstock_waiting_tokens{label}"] == band.tokens
        assert found[f"penstock_oldest_wait_seconds{label}"] == pytest.approx(band.oldest_s, abs=3)
    assert found["penstock_backlog_tokens"] == load.tokens == pytest.approx(4 * (50 + 12), abs=4)
    assert (found["penstock_wanted_workers"], found["penstock_fleet_workers"]) == (load.wanted_workers, 1)
    assert (after["penstock_backlog_tokens"], after["penstock_wanted_workers"]) == (0, 0)
    assert after['penstock_waiting_requests{priority="0"}'] == 0
    assert 'penstock_waiting_requests{priority="7"}' not in after


async def _waits(redis: RedisClient, count: int) -> bool:
    load = await numbers(redis)
    return load.num_waiting == count and load.at_ms > 0 and sum(band.num_requests for band in load.bands) == count


async def test_a_worker_that_drains_has_no_room_for_anybody(
    redis_url: str, redis: RedisClient, raw: RedisClient
) -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.hold()
    async with running_worker(redis_url, engine, drain_timeout_s=30.0) as worker:
        await send(redis, prompt="x", max_tokens=3)

        async def shows(num_workers: int) -> bool:
            load = await numbers(raw)
            return (load.num_workers, load.num_running) == (num_workers, 1)

        await eventually(lambda: shows(1))
        worker.service.request_drain()
        await eventually(lambda: shows(0))
        engine.allow()
        await worker.task


async def test_deadlines_that_workers_cannot_keep_are_refused(
    redis_url: str, redis: RedisClient, raw: RedisClient
) -> None:
    engine = FakeEngine(max_num_seqs=1, step_s=0.01)
    async with running_worker(redis_url, engine), AsyncClient(redis_url, queue="q") as client:
        for _ in range(100):
            await send(redis, prompt="x", max_tokens=20, priority=1)

        async def is_known() -> bool:
            load = await numbers(raw)
            return load.tokens_per_s > 0 and load.tokens > 0

        await eventually(is_known)
        with pytest.raises(QueueFull) as caught:
            await client.submit("x", max_tokens=1, timeout_s=1)
        assert caught.value.wait_s is not None
        assert 1 < caught.value.wait_s < 100
        urgent = await client.submit("x", max_tokens=1, timeout_s=30, priority=2)  # before the crowd
        assert (await urgent.result(30)).finish_reason == "length"


def test_the_docs_name_what_the_manifest_has() -> None:
    text = (DOCS / "scaling.md").read_text()
    kinds = {trigger["type"] for trigger in manifest()["triggers"]}
    assert kinds == {"redis-streams", "prometheus"}
    assert all(f"`{kind}`" in text for kind in kinds)
    assert "penstock_wanted_workers" in text

"""Virtual token counters on the real scripts: tenants that always wait are served alike, whatever others do.

The bound is that of Sheng et al. (arXiv 2401.00588, theorem 4.4), for a fleet. For two tenants that always have
something waiting, what each was served over its weight differs by no more than twice what can run at once costs.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient, connect, ensure_group
from penstock.protocol.redis.pipeline import Command
from penstock.protocol.scripts import Bill
from tests.protocol.scripts.script_calls import STREAM
from tests.support.redis_servers.streams import add_entry

pytestmark = pytest.mark.every_server

LIMITS: dict[str, Any] = {"max_body_bytes": 10_000, "max_bytes": 10**6}
OUTPUT_WEIGHT = 2
TURNS = 60


@dataclass(frozen=True)
class Tenant:
    name: str
    weight: float
    prompt: int  # tokens of each of its requests
    output: int
    num_waiting: int  # that it keeps in the queue; others come and go at random

    @property
    def cost(self) -> int:
        return self.prompt + OUTPUT_WEIGHT * self.output


@dataclass
class Worker:
    name: str
    running: dict[str, int] = field(default_factory=dict)  # output tokens so far, by entry


tenants = st.builds(
    Tenant,
    name=st.just(""),
    weight=st.sampled_from([0.5, 1.0, 1.0, 3.0]),
    prompt=st.integers(10, 200),
    output=st.integers(1, 40),
    num_waiting=st.sampled_from([0, 8, 30]),
)


class Fleet:
    """Workers that take, generate, charge and die; time is counted in turns."""

    def __init__(self, redis: RedisClient, found: list[Tenant], slots: int, random: Random) -> None:
        self.redis, self.slots, self.random = redis, slots, random
        self.tenants = {f"t{i}": tenant for i, tenant in enumerate(found)}
        self.workers = [Worker("w0"), Worker("w1"), Worker("w2")]
        self.owner: dict[str, str] = {}  # tenant, by entry
        self.progress: dict[str, int] = {}  # published, by entry
        self.served = dict.fromkeys(self.tenants, 0.0)
        self.num_names = 3

    async def send(self, command: Command) -> Any:
        return await self.redis.execute_command(*command)

    async def arrive(self) -> None:
        for name, tenant in self.tenants.items():
            queued = sum(owner == name and entry not in self.progress for entry, owner in self.owner.items())
            wanted = tenant.num_waiting - queued if tenant.num_waiting else self.random.choice((0, 0, 0, 5))
            for _ in range(wanted):
                body: Any = {"tenant": name, "prompt": "x" * (4 * tenant.prompt - 20)}
                self.owner[await add_entry(self.redis, STREAM, body)] = name

    async def take(self, worker: Worker) -> None:
        spare = self.slots - len(worker.running)
        if spare <= 0:
            return
        found, *_ = await self.send(scripts.take("q", worker=worker.name, count=spare, **LIMITS))
        for entry in found:
            entry_id = entry[0].decode()
            name = self.owner[entry_id]
            if entry_id not in self.progress:
                self.progress[entry_id] = 0
                self.served[name] += self.tenants[name].prompt
            worker.running[entry_id] = self.progress[entry_id]

    async def generate(self, worker: Worker) -> None:
        bills = []
        for entry_id in list(worker.running):
            name = self.owner[entry_id]
            tenant = self.tenants[name]
            more = min(self.random.randint(1, 6), tenant.output - worker.running[entry_id])
            worker.running[entry_id] += more
            self.served[name] += OUTPUT_WEIGHT * more
            self.progress[entry_id] = worker.running[entry_id]
            bill = Bill(entry_id, name, tenant.prompt + OUTPUT_WEIGHT * worker.running[entry_id])
            if worker.running[entry_id] == tenant.output:
                del worker.running[entry_id]
                await self.send(scripts.ack("q", worker=worker.name, bills=[bill]))
            else:
                bills.append(bill)
        if bills and self.random.random() < 0.7:
            await self.send(scripts.charge("q", worker=worker.name, bills=bills))

    async def die(self, at: int) -> None:
        dead = self.workers[at]
        await self.send(scripts.retire("q", stream=STREAM, consumer=dead.name, count=1000))
        self.workers[at] = Worker(f"w{self.num_names}")
        self.num_names += 1

    async def turn(self) -> None:
        await self.arrive()
        for worker in self.random.sample(self.workers, len(self.workers)):
            await self.take(worker)
            await self.generate(worker)
        if self.random.random() < 0.05:
            await self.die(self.random.randrange(len(self.workers)))


def test_who_always_waits_is_served_alike(redis_url: str) -> None:
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(tenants, min_size=2, max_size=5), st.integers(1, 6), st.integers(0, 2**32))
    def check(found: list[Tenant], slots: int, seed: int) -> None:
        asyncio.run(run_fleet(redis_url, found, slots, Random(seed)))

    check()


async def run_fleet(url: str, found: list[Tenant], slots: int, random: Random) -> None:
    redis = connect(url, decode=False, retries=0)
    await redis.flushall()
    await ensure_group(redis, "q")
    fleet = Fleet(redis, found, slots, random)
    weights = {name: str(tenant.weight) for name, tenant in fleet.tenants.items()}
    await redis.hset(keys.weights("q"), mapping=weights)  # type: ignore[arg-type]
    try:
        await fleet.turn()
        before = dict(fleet.served)
        for _ in range(TURNS):
            await fleet.turn()
            always = {name: tenant for name, tenant in fleet.tenants.items() if tenant.num_waiting}
            at_once = len(fleet.workers) * slots
            bound = 2 * at_once * max((t.cost / t.weight for t in always.values()), default=0)
            shares = [(fleet.served[name] - before[name]) / tenant.weight for name, tenant in always.items()]
            assert max(shares, default=0) - min(shares, default=0) <= bound
    finally:
        await redis.aclose()

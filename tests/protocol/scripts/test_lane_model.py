"""The model of the policy and the scripts take the same entries of a trace, in one order, with one account."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from benchmarks.lanes.model import MAX_OVERTAKES, EntryId, Lanes, Waiting
from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient, connect, ensure_group
from penstock.protocol.scripts import Bill
from tests.protocol.scripts.script_calls import STREAM

pytestmark = pytest.mark.every_server

LIMITS: dict[str, Any] = {"max_body_bytes": 10_000, "max_bytes": 10**6}
TURNS = 120
SINCE_MS = 1_700_000_000_000  # long ago: all that waits has waited for long
WEIGHTS = {"b": 3.0, "d": 0.5}
PRIORITIES = (0, 0, 0, 5, -5)


class Trace:
    """Random arrivals, takes and charges, on both sides."""

    def __init__(self, redis: RedisClient, random: Random) -> None:
        self.redis, self.random = redis, random
        self.model = Lanes()
        self.model.weights = WEIGHTS
        self.running: dict[EntryId, tuple[Waiting, int]] = {}  # with what each was said to have cost
        self.last = EntryId(SINCE_MS, 0)

    async def arrive(self) -> None:
        step_ms = self.random.choice((0, 0, 1, 7000))
        self.last = EntryId(self.last.ms + step_ms, 0 if step_ms else self.last.number + 1)
        tenant, priority = self.random.choice("abcde"), self.random.choice(PRIORITIES)
        fields = {"tenant": tenant, "prompt": ""}
        if priority or self.random.random() < 0.5:
            fields["priority"] = str(priority)
        timeout_s = self.random.choice((None, None, 0.5, 30, 3600.25))
        if timeout_s is not None:
            fields["timeout_s"] = str(timeout_s)
        size = self.random.choice((119, 120, 120, 240))  # so that tenants are often served alike
        fields["prompt"] = "x" * (size - sum(len(name) + len(value) for name, value in fields.items()))
        await self.redis.xadd(STREAM, fields, id=f"{self.last.ms}-{self.last.number}")  # type: ignore[arg-type]
        self.model.arrive(Waiting(self.last, tenant, priority, timeout_s, cost=-(-size // 4)))
        assert await self.taken(0) == []  # it gets its place before the next one comes

    async def take(self) -> None:
        count, most = self.random.randint(1, 6), self.random.choice((0, 3, 20, 20))
        expected = self.model.take(count, SINCE_MS + 10**9, max_overtakes=most)
        assert await self.taken(count, max_overtakes=most) == [entry.id for entry in expected]
        self.running |= {entry.id: (entry, 0) for entry in expected}

    async def taken(self, count: int, *, max_overtakes: int = MAX_OVERTAKES) -> list[EntryId]:
        command = scripts.take("q", worker="w", count=count, max_overtakes=max_overtakes, **LIMITS)
        entries, *_ = await self.redis.execute_command(*command)
        return [EntryId(*map(int, entry[0].split(b"-"))) for entry in entries]

    async def charge(self) -> None:
        """Some running requests progress; one of them ends."""
        if not self.running:
            return
        chosen = self.random.sample(sorted(self.running), min(4, len(self.running)))
        totals = {entry: self.running[entry][1] + 30 * self.random.randrange(0, 4) for entry in chosen}
        for entry, total in totals.items():
            self.running[entry] = (self.running[entry][0], total)
        bills = [Bill(f"{id_.ms}-{id_.number}", self.running[id_][0].tenant, total) for id_, total in totals.items()]
        await self.redis.execute_command(*scripts.charge("q", worker="w", bills=bills))
        self.model.charge([(id_, self.running[id_][0].tenant, total) for id_, total in totals.items()])
        await self.redis.execute_command(*scripts.ack("q", worker="w", bills=bills[:1]))
        waiting, total = self.running.pop(chosen[0])
        self.model.settle(waiting.id, waiting.tenant, total)

    async def give_back(self) -> None:
        """Some running requests give way, or all of them have lost their worker."""
        if self.random.random() < 0.2:
            given_back = sorted(self.running)
            await self.redis.execute_command(*scripts.retire("q", stream=STREAM, consumer="w", count=1000))
        else:
            given_back = self.random.sample(sorted(self.running), min(3, len(self.running)))
            ids = [f"{id_.ms}-{id_.number}" for id_ in given_back]
            await self.redis.execute_command(*scripts.put_back("q", worker="w", entry_ids=ids))
        for entry in given_back:
            self.model.give_back(self.running.pop(entry)[0])

    async def check_accounts(self) -> None:
        bands: Any = await self.redis.zrange(keys.bands("q"), 0, -1)
        waiting: dict[str, float] = {}
        for band in bands:
            waiting |= await self.counters(keys.band("q", band.decode()))
        assert waiting == self.model.counters
        assert await self.counters(keys.service("q")) == self.model.service
        charged = await self.redis.hgetall(keys.charged("q"))
        assert len(charged) == len(self.model.charged)

    async def counters(self, key: str) -> dict[str, float]:
        found: Any = await self.redis.zrange(key, 0, -1, withscores=True)
        return {name.decode(): score for name, score in found}


@pytest.mark.parametrize("seed", range(8))
def test_the_model_gives_out_what_the_scripts_do(redis_url: str, seed: int) -> None:
    asyncio.run(replay(redis_url, Random(seed)))


async def replay(url: str, random: Random) -> None:
    redis = connect(url, decode=False, retries=0)
    await redis.flushall()
    await ensure_group(redis, "q")
    await redis.hset(keys.weights("q"), mapping={name: str(weight) for name, weight in WEIGHTS.items()})
    trace = Trace(redis, random)
    try:
        for _ in range(TURNS):
            turns = (*[trace.arrive] * 6, *[trace.take] * 2, *[trace.charge] * 2, trace.give_back)
            await random.choice(turns)()
            await trace.check_accounts()
        for _ in range(len(trace.model)):  # each takes one or more
            await trace.take()
        assert len(trace.model) == 0
        assert await trace.taken(9) == []
        await trace.check_accounts()
    finally:
        await redis.aclose()

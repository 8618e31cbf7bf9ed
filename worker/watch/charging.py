"""Reports to the queue what tenants have been served, so that the least served is next."""

from __future__ import annotations

import asyncio

from penstock.protocol import scripts
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.scripts import Bill
from penstock.serving.readiness import Readiness
from penstock.worker.config import WorkerConfig
from penstock.worker.redis import retries
from penstock.worker.redis.guarded import execute_one
from penstock.worker.run.requests import Phase, RequestTable

CHARGE_INTERVAL_S = 1.0  # the final cost of an entry is reported when it leaves the queue
BILLS_PER_SCRIPT = 256
_PART = "charging"  # name in readiness


class Charging:
    """Reports from time to time what running requests have cost so far. The next report makes up for a failed one."""

    def __init__(self, redis: RedisClient, config: WorkerConfig, requests: RequestTable, readiness: Readiness) -> None:
        self._redis = redis
        self._config = config
        self._requests = requests
        self._readiness = readiness
        self._told: dict[str, Bill] = {}  # by entry

    async def run(self) -> None:
        while True:
            await asyncio.sleep(CHARGE_INTERVAL_S)
            await retries.survive(self.charge(), _PART, self._readiness)

    async def charge(self) -> None:
        bills = {live.entry_id: live.bill for live in self._requests if live.phase is Phase.RUNNING}
        changed = [bill for entry_id, bill in bills.items() if self._told.get(entry_id) != bill]
        self._told = {entry_id: bill for entry_id, bill in self._told.items() if entry_id in bills}
        for start in range(0, len(changed), BILLS_PER_SCRIPT):
            page = changed[start : start + BILLS_PER_SCRIPT]
            await execute_one(self._redis, scripts.charge(self._config.queue, worker=self._config.name, bills=page))
            self._told |= {bill.entry_id: bill for bill in page}

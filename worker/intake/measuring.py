"""Reports this worker's capacity to the queue, and helps to measure the whole fleet's backlog."""

from __future__ import annotations

import asyncio
import random
import time

from penstock.engine.driver import EngineDriver
from penstock.protocol import scripts
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.scripts import WorkerCapacity
from penstock.serving.readiness import Readiness
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.intake import Intake
from penstock.worker.metrics import WorkerMetrics
from penstock.worker.redis import retries
from penstock.worker.redis.guarded import execute_one
from penstock.worker.run.capacity import Capacity
from penstock.worker.run.entries import BYTES_PER_READ
from penstock.worker.run.requests import RequestTable

MEASURE_INTERVAL_S = 1.0
LOOK_EVERY_MS = 1000


class Measuring:
    """Measures every second, give or take a quarter, so that workers spread out. A draining worker reports no slots."""

    def __init__(
        self,
        redis: RedisClient,
        config: WorkerConfig,
        requests: RequestTable,
        intake: Intake,
        driver: EngineDriver,
        metrics: WorkerMetrics,
        readiness: Readiness,
    ) -> None:
        self._redis = redis
        self._config = config
        self._requests = requests
        self._intake = intake
        self._driver = driver
        self._latency = metrics.redis_seconds.labels(operation="measure")
        self._readiness = readiness
        self._capacity = Capacity(driver.max_num_seqs)

    async def run(self) -> None:
        while True:
            await retries.survive(self.measure(), "measuring", self._readiness)
            await asyncio.sleep(MEASURE_INTERVAL_S * random.uniform(0.75, 1.25))

    async def measure(self) -> None:
        queue, worker = self._config.queue, self._config.name
        said = scripts.say(queue, worker=worker, part=self._part(), every_ms=LOOK_EVERY_MS)
        with self._latency.time():
            num_waiting, is_due = await execute_one(self._redis, said)
        if is_due:  # one worker measures at a time: the script ensures it
            target_s = self._config.target_wait_s
            look = scripts.measure(queue, every_ms=LOOK_EVERY_MS, target_s=target_s, max_bytes=BYTES_PER_READ)
            num_waiting = await execute_one(self._redis, look)
        stats = self._driver.stats
        self._capacity.note(
            time.monotonic(),
            num_tokens=stats.prompt_tokens_total + stats.generated_tokens_total,
            num_requests=len(self._requests),
            num_waiting=num_waiting,
        )

    def _part(self) -> WorkerCapacity:
        if self._intake.is_stopping:
            return WorkerCapacity(slots=0)
        ended = self._requests.ended
        return WorkerCapacity(self._capacity.slots, self._capacity.tokens_per_s, ended.reply_tokens, ended.token_bytes)

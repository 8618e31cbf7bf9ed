"""Reports this worker's state and its requests to operators, twice a second (`protocol.operations.reports`)."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from penstock.engine.driver import EngineDriver
from penstock.protocol import scripts
from penstock.protocol.operations.reports import (
    MAX_REPORTED,
    REMEMBERED_S,
    REPORT_INTERVAL_S,
    ReportedRequest,
    WorkerPhase,
    WorkerReport,
)
from penstock.protocol.operations.reports import Phase as ReportedPhase
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.version import __version__
from penstock.protocol.wire import ModelCard
from penstock.serving.readiness import Readiness
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.intake import Intake
from penstock.worker.redis import retries
from penstock.worker.redis.guarded import execute_one
from penstock.worker.run.requests import LiveRequest, Phase, RequestTable

RATE_WINDOW_S = 2.0
"""Period over which tokens per second are averaged."""

_PART = "reporting"  # name in readiness
_PHASES: dict[Phase, ReportedPhase] = {
    Phase.CLAIMED: "preparing", Phase.RESTORED: "preparing", Phase.ADMITTED: "preparing",
    Phase.RUNNING: "running", Phase.ENDED: "ending",
}  # fmt: skip


class WorkReport:
    """Collects a report for operators about a worker with a model.

    Args:
        card: the worker's.
        device: the one that the engine runs on; None: unknown.
        driver: the engine's.
        requests: all requests of the worker.
        intake: says whether the worker drains.
    """

    def __init__(
        self, card: ModelCard, device: str | None, driver: EngineDriver, requests: RequestTable, intake: Intake
    ) -> None:
        self._card = card
        self._device = device
        self._driver = driver
        self._requests = requests
        self._intake = intake
        self._generated: deque[tuple[float, int]] = deque()  # (monotonic time, tokens so far)

    def report(self, *, unready: str | None, heartbeat_ttl_ms: int) -> WorkerReport:
        stats = self._driver.stats
        phase: WorkerPhase = "draining" if self._intake.is_stopping else "serving"
        lives = sorted((live for live in self._requests if live.phase in _PHASES), key=_since)
        return WorkerReport(
            version=__version__,
            phase=phase,
            unready=unready,
            heartbeat_ttl_ms=heartbeat_ttl_ms,
            model=self._card.model or None,
            digest=self._card.digest,
            device=self._device,
            slots=self._driver.max_num_seqs,
            running_sequences=stats.num_running,
            waiting_sequences=stats.num_waiting,
            pages=stats.num_pages,
            free_pages=stats.num_free_pages,
            cached_pages=stats.num_cached_pages,
            tokens_per_s=round(self._rate(time.monotonic(), stats.generated_tokens_total), 1),
            num_requests=len(lives),
            requests=tuple(map(_reported, lives[:MAX_REPORTED])),
        )

    def _rate(self, now_s: float, generated: int) -> float:
        """Returns tokens per second, over `RATE_WINDOW_S` or what is known."""
        looks = self._generated
        looks.append((now_s, generated))
        while len(looks) > 2 and now_s - looks[1][0] >= RATE_WINDOW_S:
            looks.popleft()
        since_s, before = looks[0]
        return (generated - before) / (now_s - since_s) if now_s > since_s else 0.0


class Reporting:
    """Reports the worker's state.

    Args:
        redis: to report to.
        config: the worker's.
        readiness: says what is wrong or awaited.
        work: says what the worker does; None: no model yet.
    """

    def __init__(self, redis: RedisClient, config: WorkerConfig, readiness: Readiness, work: WorkReport | None) -> None:
        self._redis = redis
        self._config = config
        self._readiness = readiness
        self._work = work
        self._ttl_ms = round(config.heartbeat_ttl_s * 1000)

    async def run(self) -> None:
        while True:
            await retries.survive(self.report(), _PART, self._readiness)
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def report(self) -> None:
        unready = "; ".join(self._readiness.reasons.values()) or None
        if self._work is None:
            report = WorkerReport(version=__version__, phase="starting", unready=unready)
        else:
            report = self._work.report(unready=unready, heartbeat_ttl_ms=self._ttl_ms)
        said = scripts.report(
            self._config.queue,
            worker=self._config.name,
            text=report.encode(),
            ttl_ms=self._ttl_ms,
            listed_ms=round(REMEMBERED_S * 1000),
        )
        await execute_one(self._redis, said)

    async def stop(self) -> None:
        """Withdraws the last report, so that nobody takes the worker for dead."""
        await execute_one(self._redis, scripts.unreport(self._config.queue, worker=self._config.name))


def _since(live: LiveRequest) -> int:
    return live.claim.server_ms


def _reported(live: LiveRequest) -> ReportedRequest:
    return ReportedRequest(
        id=live.id,
        enqueued_ms=live.enqueued_ms,
        claimed_ms=live.claim.server_ms,
        turn=live.claim.attempts,
        phase=_PHASES[live.phase],
        tenant=live.tenant or None,
        prompt_tokens=live.prompt_tokens,
        tokens=live.completion_tokens,
        prefilled=0 if live.prefill is None else live.prefill.num_computed,
    )

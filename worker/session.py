"""A worker's service of its queue: joining, serving, draining, leaving."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING, Any

import structlog
from redis.asyncio import RedisCluster

from penstock.engine.driver import EngineDriver
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.protocol import scripts
from penstock.protocol.consumers import kind_of
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.tasks import end_tasks
from penstock.protocol.wire import ModelCard
from penstock.serving.readiness import Readiness
from penstock.serving.refusals import Refusals
from penstock.worker.calls.answering import Answerer, Answers
from penstock.worker.calls.server import CallServer
from penstock.worker.config import WorkerConfig
from penstock.worker.errors import DrainIncomplete, EngineFailed, TaskFailed, WorkerError
from penstock.worker.intake.claiming import Claimer
from penstock.worker.intake.handing_back import HandingBack
from penstock.worker.intake.intake import Intake
from penstock.worker.intake.measuring import Measuring
from penstock.worker.intake.preparation import Preparer
from penstock.worker.intake.restore import Restorer
from penstock.worker.intake.suspects import Suspects
from penstock.worker.metrics import WorkerMetrics
from penstock.worker.presence.heartbeat import Heartbeat, Reclaimer
from penstock.worker.publish.coalescing import Coalescing
from penstock.worker.publish.outbox import Outbox
from penstock.worker.publish.publisher import Publisher
from penstock.worker.redis import retries
from penstock.worker.run.entries import EntryReader
from penstock.worker.run.requests import Phase, RequestTable
from penstock.worker.threads import Threads
from penstock.worker.watch.cancel import CancelWatch
from penstock.worker.watch.charging import Charging
from penstock.worker.watch.reporting import Reporting, WorkReport
from penstock.worker.watch.sweeping import sweep_forever

if TYPE_CHECKING:
    from penstock.worker.run.spans import RequestSpans

_log = structlog.get_logger(__name__)
_PART = "service"  # name in readiness

HAND_BACK_TIMEOUT_S = 5.0  # after the grace period: for the last tokens and for giving requests back
GOODBYE_TIMEOUT_S = 1.0


class Session:
    """Owns the tasks that serve one queue. If any task ends, the session ends, with that task's reason."""

    def __init__(
        self,
        redis: RedisClient,
        blocking: RedisClient,
        config: WorkerConfig,
        card: ModelCard,
        device: str | None,
        driver: EngineDriver,
        preparer: Preparer,
        defaults: GenerationDefaults,
        metrics: WorkerMetrics,
        readiness: Readiness,
        refusals: Refusals,
        spans: RequestSpans | None = None,
    ) -> None:
        instance = scripts.new_instance(round(config.heartbeat_ttl_s * 1000))
        self._redis = redis
        self._config = config
        self._card = card
        self._driver = driver
        self._readiness = readiness
        self._refusals = refusals
        self.requests = RequestTable(driver.abort)
        coalescing = Coalescing(
            config.flush_interval_ms / 1000, config.max_flush_interval_ms / 1000, driver.set_patience
        )
        self._outbox = Outbox(config, self.requests, coalescing, has_nodes=isinstance(redis, RedisCluster))
        self._publisher = Publisher(redis, self._outbox, coalescing, metrics, readiness)
        self._handing_back = HandingBack(redis, config, driver, self._outbox, self._publisher, metrics)
        self._heartbeat = Heartbeat(redis, config, instance, readiness, card)
        self._threads = Threads()
        digest, arithmetic = card.digest or "", card.arithmetic or ""
        self._claimer = Claimer(
            redis, config, instance, self._threads, self._outbox, metrics, digest, arithmetic, spans
        )
        restorer = Restorer(redis, config, self._threads, preparer, defaults, self._outbox)
        self._intake = Intake(
            EntryReader(redis, blocking, config, (digest, kind_of(digest, arithmetic))),
            self._claimer,
            restorer,
            driver,
            self._outbox,
            self._handing_back,
            Suspects(self.requests, driver, self._handing_back, wait_s=config.suspect_wait_s),
            self._heartbeat,
            readiness,
        )
        answerer = Answerer(config.max_body_bytes, _answers(config, card, driver, preparer, defaults))
        self._calls = CallServer(redis, blocking, config, answerer, metrics, readiness)
        self._charging = Charging(redis, config, self.requests, readiness)
        self._measuring = Measuring(redis, config, self.requests, self._intake, driver, metrics, readiness)
        work = WorkReport(card, device, driver, self.requests, self._intake)
        self._reporting = Reporting(redis, config, readiness, work)
        self._reclaimer = Reclaimer(redis, config, metrics, readiness)
        self._cancel = CancelWatch(redis, self._outbox, driver, readiness, poll_s=config.cancel_poll_ms / 1000)
        self._tasks: set[asyncio.Task[None]] = set()
        self.has_engine_ended = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop`, `penstock drain`, the loss of its name or too long a refusal by Redis, then drains.

        If cancelled, it leaves at once; others find its requests.

        Raises:
            WorkerError: the session ended for another reason.
        """
        await self._join(stop)
        try:
            if stop.is_set():
                return
            intake = self._start(self._intake.run(), "intake")
            for work, name in (
                (self._publisher.run(), "publisher"),
                (self._heartbeat.run(), "heartbeat"),
                (self._reclaimer.run(), "reclaimer"),
                (sweep_forever(self._intake, self._readiness), "sweeper"),
                (self._charging.run(), "charging"),
                (self._measuring.run(), "measuring"),
                (self._cancel.run(), "cancel"),
                (self._calls.run(), "calls"),
                (self._refusals.run(), "refusals"),
                (self._driver.wait_ended(), "engine"),
            ):
                self._start(work, name)
            self._heartbeat.set_serving(True)
            await self._while_working(self._wait_until_told(stop, self._heartbeat.has_announced))
            if self._heartbeat.has_announced.is_set():
                self._say_joined()
                self._start(self._reporting.run(), "reporting")  # its first report says that this worker is ready
            await self._while_working(self._wait_until_told(stop))
            await self._drain_for(self._heartbeat.must_end or self._refused, intake)
        finally:
            await self._leave()

    async def _join(self, stop: asyncio.Event) -> None:
        """Takes the name; waits for Redis if it is away."""
        self._readiness.not_ready(_PART, "joining the queue")
        await retries.persist(lambda: self._heartbeat.start(stop), "join", self._readiness, stop)

    def _say_joined(self) -> None:
        self._readiness.ready(_PART)
        _log.info(
            "joined",
            queue=self._config.queue,
            worker=self._config.name,
            digest=self._card.digest,
            arithmetic=self._card.arithmetic,
        )

    async def _wait_until_told(self, *or_until: asyncio.Event) -> None:
        """Waits for what makes this worker drain, or for an event."""
        reasons = (*or_until, self._heartbeat.must_drain, self._refusals.must_drain)
        waits = [asyncio.create_task(event.wait()) for event in reasons]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    @property
    def _refused(self) -> WorkerError | None:
        """Error to end with, if Redis has refused for too long."""
        return None if self._refusals.refusal is None else retries.refusal(self._refusals.refusal)

    async def _drain_for(self, reason: WorkerError | None, intake: asyncio.Task[None]) -> None:
        """Drains, then raises `reason`, if there is one, even if Redis does not take back all requests."""
        try:
            await self._drain(intake)
        except DrainIncomplete as error:
            if reason is not None:
                raise reason from error
            raise
        if reason is not None:
            raise reason

    async def _drain(self, intake: asyncio.Task[None]) -> None:
        """Stops reading, waits for running requests within the grace period, and gives the rest back."""
        self._readiness.not_ready(_PART, "draining")
        _log.info("draining", live=len(self.requests), timeout_s=self._config.drain_timeout_s)
        give_up_s = time.monotonic() + self._config.drain_timeout_s
        self._heartbeat.set_serving(False)
        self._intake.stop()
        self._calls.stop()
        try:
            async with asyncio.timeout(self._config.drain_timeout_s + HAND_BACK_TIMEOUT_S):
                await self._while_working(asyncio.wait({intake}))
        except TimeoutError as error:  # outputs cannot be published: Redis is away
            raise DrainIncomplete(
                "requests that were being taken, or gave way, could not be handed back;"
                " other workers take them once this one's heartbeat is gone"
            ) from error
        try:
            async with asyncio.timeout(max(0.0, give_up_s - time.monotonic())):
                await self._while_working(self._wait_until_done())
        except TimeoutError:
            _log.warning("drain_timeout", live=len(self.requests))
        if len(self.requests) or self.requests.parked:
            await self._hand_back()

    async def _wait_until_done(self) -> None:
        while any(live.phase >= Phase.RUNNING for live in self.requests):  # the others' turn never comes
            await self.requests.changed.wait()
        await self._publisher.wait_idle()

    async def _hand_back(self) -> None:
        """Publishes what was generated, and gives unfinished requests to workers with capacity; their progress is on
        the reply streams.

        Raises:
            DrainIncomplete: Redis did not accept that in time.
        """
        try:
            async with asyncio.timeout(HAND_BACK_TIMEOUT_S):
                await self._while_working(self._handing_back.give_back_all())
        except (TimeoutError, *retries.REDIS_ERRORS) as error:
            raise DrainIncomplete(
                f"{len(self.requests)} requests could not be handed back within {HAND_BACK_TIMEOUT_S:g} s;"
                " other workers take them once this one's heartbeat is gone"
            ) from error

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        return task

    async def _while_working(self, wait_for: Awaitable[Any]) -> None:
        """Waits for `wait_for` while all tasks work.

        Raises:
            WorkerError: a task ended first.
        """
        waiter = asyncio.ensure_future(wait_for)
        try:
            while not waiter.done():
                await asyncio.wait({waiter, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
                self._check_tasks()
            await waiter
        finally:
            waiter.cancel()

    def _check_tasks(self) -> None:
        ended = [task for task in self._tasks if task.done()]
        ended.sort(key=lambda task: task.get_name() != "engine")  # the others may have failed because of it
        self.has_engine_ended = any(task.get_name() == "engine" for task in ended)
        for task in ended:
            self._tasks.discard(task)
            _raise_end(task, is_expected=task.get_name() in ("intake", "calls") and self._intake.is_stopping)

    async def _leave(self) -> None:
        """Ends all tasks, then the heartbeat, so that others need not wait for it to expire."""
        self._readiness.not_ready(_PART, "stopped")
        await end_tasks([task for task in self._tasks if task.get_name() != "publisher"])
        await self._try_goodbye(self._publisher.wait_idle())
        await end_tasks(self._tasks)
        await self._try_goodbye(self._heartbeat.stop())
        await self._try_goodbye(self._reporting.stop())
        await self._claimer.close()
        self._threads.close()

    async def _try_goodbye(self, part: Coroutine[Any, Any, None]) -> None:
        """Signs off at Redis if it is there; otherwise the heartbeat's time to live does the rest."""
        try:
            async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                await part
        except (TimeoutError, *retries.REDIS_ERRORS) as error:
            _log.warning("left_without_goodbye", error=repr(error), live=len(self.requests))


def _raise_end(task: asyncio.Task[None], *, is_expected: bool) -> None:
    error = task.exception()
    if isinstance(error, WorkerError):
        raise error
    if task.get_name() == "engine":
        raise EngineFailed(f"the engine's thread ended: {error!r}") from error
    if error is not None:
        raise TaskFailed(f"the task {task.get_name()!r} ended with {error!r}") from error
    if not is_expected:
        raise TaskFailed(f"the task {task.get_name()!r} ended by itself")


def _answers(
    config: WorkerConfig, card: ModelCard, driver: EngineDriver, preparer: Preparer, defaults: GenerationDefaults
) -> Answers:
    vocab_size = max(preparer.text.vocab_size, card.vocab_size or 0)  # a model may be padded beyond its tokenizer
    return Answers(config, preparer, vocab_size, defaults, driver.check)

"""The long-running service: tries Redis, loads, joins the queue, serves, drains; its health port is open from the
start.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import structlog

from penstock.engine.driver import EngineDriver, StepEngine
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.loading.identity import Identity
from penstock.engine.stats import DeviceMemory, EngineInfo
from penstock.protocol import keys
from penstock.protocol.queue.load import QueueLoad
from penstock.protocol.redis.address import Address, parse_url
from penstock.protocol.redis.connection import RedisClient, connect, connect_blocking
from penstock.protocol.tasks import Joined, end_tasks
from penstock.protocol.wire import ModelCard
from penstock.serving.exporting import exporting
from penstock.serving.exposition import render
from penstock.serving.listening import shown
from penstock.serving.readiness import Readiness
from penstock.serving.refusals import Refusals
from penstock.worker.card import make_card
from penstock.worker.config import WorkerConfig
from penstock.worker.errors import Aborted, EngineFailed, WorkerError
from penstock.worker.health.server import HealthApp, HealthServer
from penstock.worker.intake.measured_grammars import MeasuredGrammars
from penstock.worker.intake.preparation import Grammars, Preparer, TextEncoder
from penstock.worker.metrics import WorkerMetrics
from penstock.worker.presence.reservation import Reservation
from penstock.worker.redis import retries
from penstock.worker.redis.permissions import check_permissions
from penstock.worker.session import Session
from penstock.worker.startup_report import NO_COMPILER_HINT, STARTED, describe, device_of
from penstock.worker.watch.reporting import Reporting

if TYPE_CHECKING:
    from penstock.protocol.telemetry.sdk import Telemetry
    from penstock.worker.run.spans import RequestSpans

_log = structlog.get_logger(__name__)
_PART = "service"  # name in readiness
_MUCH_PADDING = 0.05  # share of the pages from which padding is worth a warning

SCRAPE_TIMEOUT_S = 1.0
ENGINE_STOP_TIMEOUT_S = 10.0
LEAVE_PATIENCE_S = 20.0
RELEASE_TIMEOUT_S = 1.0


Say: TypeAlias = Callable[[str], None]
"""Called with what a worker does before it serves, such as `warming up`, from any thread."""


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded and warmed-up model."""

    engine: StepEngine
    text: TextEncoder
    defaults: GenerationDefaults
    name: str = ""
    info: EngineInfo | None = None  # None: nothing is known of the engine, as with a fake
    grammars: Grammars | None = None  # None: replies can't be constrained
    identity: Identity | None = None  # None: there is no checkpoint
    chat_format: str | None = None  # how replies in chats are parsed; None: as plain text
    memory: Callable[[], Sequence[DeviceMemory]] = tuple  # of its devices, as far as known


class WorkerService:
    """One worker. Made in any thread, run once in an event loop, stopped by `request_drain` from that loop.

    Args:
        config: its settings.
        address: where Redis is.
        load: loads and warms up the model, in a thread of its own; the service can be told to stop meanwhile.
        telemetry: takes traces and metrics, closed at the end; None: there is none.
    """

    def __init__(
        self,
        config: WorkerConfig,
        address: Address | str,
        load: Callable[[Say], Model],
        telemetry: Telemetry | None = None,
    ) -> None:
        self.config = config
        self._telemetry = telemetry
        self.metrics = WorkerMetrics(config.queue)
        self._address = parse_url(address) if isinstance(address, str) else address
        self.readiness = Readiness(str(self._address))
        self.readiness.not_ready(_PART, "looking for Redis")
        self._load = load
        self._is_loading = True
        self._stop = asyncio.Event()
        self._abort = asyncio.Event()
        self._driver: EngineDriver | None = None
        self._session: Session | None = None
        self._redis: RedisClient | None = None
        self._health: HealthServer | None = None
        self._memory: Callable[[], Sequence[DeviceMemory]] = tuple
        self._refresh = Joined(self._refresh_metrics)

    def request_drain(self) -> None:
        """Asks for a drain; a second call aborts it. Meant to be called by a signal handler of the event loop."""
        if self._stop.is_set():
            self._abort.set()
        self._stop.set()

    @property
    def health_port(self) -> int | None:
        """Port that the health server listens on, once `run` has started it."""
        return None if self._health is None else self._health.port

    async def run(self) -> None:
        """Runs until drained.

        Raises:
            WorkerError: the worker ended for another reason; `worker.errors` lists the kinds and their exit statuses.
            BadAddress: Redis's URL can't be used.
            OSError: the health port is taken.
        """
        work = asyncio.create_task(self._run(), name="worker")
        abort = asyncio.create_task(self._abort.wait(), name="abort")
        try:
            await asyncio.wait({work, abort}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Aborted(
                    "stopped at once, as it was told to stop a second time; other workers take over its requests"
                )
            await work
        finally:
            await end_tasks([abort, work], patience_s=LEAVE_PATIENCE_S)

    async def _run(self) -> None:
        await self._start_health()
        try:
            async with exporting(self._telemetry, self.metrics.registry, self._refresh.run):
                model = await self._prepare()
                if model is not None:
                    card = make_card(model.name, self.config, model.info, model.identity, model.chat_format)
                    self._introduce(model, card)
                    await self._serve(model, card)
                    _log.info("drained", worker=self.config.name)
        finally:
            if self._health is not None:
                await self._health.stop()
            await self._refresh.close()

    def _spans_of(self, model: Model) -> RequestSpans | None:
        if self._telemetry is None or self._telemetry.provider is None:
            return None
        from penstock.worker.run.spans import RequestSpans  # needs the extra `otel`

        name, *_ = self.config.names_of(model.name)
        return RequestSpans(self._telemetry.provider, self.config.queue, self.config.name, name)

    async def _start_health(self) -> None:
        if self.config.health_port is None:
            return
        app = HealthApp(self.readiness, self._is_alive, self._scrape)
        self._health = HealthServer(app, self.config.health_host, self.config.health_port)
        await self._health.start()

    async def _prepare(self) -> Model | None:
        """Tries Redis, which is quick, before loading the model, which takes minutes. None: told to stop meanwhile."""
        redis = self._connect()
        reservation = Reservation(redis, self.config, self.readiness)

        async def try_redis() -> None:
            await check_permissions(redis, self.config.queue)
            await reservation.take(self._stop)

        try:
            await retries.persist(try_redis, "redis", self.readiness, self._stop)
            return None if self._stop.is_set() else await self._load_under(reservation, redis)
        finally:
            await redis.aclose()

    async def _load_under(self, reservation: Reservation, redis: RedisClient) -> Model | None:
        reporting = Reporting(redis, self.config, self.readiness, work=None)
        hold = asyncio.create_task(reservation.hold(), name="reservation")
        tell = asyncio.create_task(reporting.run(), name="reporting")  # if it is not permitted, the session says so
        model = None
        try:
            model = await self._load_or_stop(hold)
            return model
        finally:
            await end_tasks([hold, tell])
            with suppress(TimeoutError, *retries.REDIS_ERRORS):  # else the key lapses
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    await reservation.release()
                    if model is None:  # else the next report follows at once
                        await reporting.stop()

    async def _load_or_stop(self, hold: asyncio.Task[None]) -> Model | None:
        """None: told to stop before the model was loaded; the loading thread ends with the process."""
        loop = asyncio.get_running_loop()
        self._say("loading the model")

        def say(doing: str) -> None:
            loop.call_soon_threadsafe(self._say, doing)

        loaded = asyncio.ensure_future(_run_in_daemon_thread(partial(self._load, say)))
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({loaded, stop, hold}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                return None
            if hold.done():
                hold.result()  # raises: it cannot end otherwise
            return await _loaded(loaded)
        finally:
            self._is_loading = False
            stop.cancel()
            loaded.cancel()

    def _say(self, doing: str) -> None:
        if self._is_loading:  # a thread that nobody waits for may still go on for a while
            self.readiness.not_ready(_PART, doing)

    def _introduce(self, model: Model, card: ModelCard) -> None:
        _warn_of_ignored(model.defaults)
        health = None if self._health is None else shown(self.config.health_host, self._health.port)
        where = {"queue": self.config.queue, "worker": self.config.name, "redis": str(self._address)}
        _log.info(STARTED, **describe(model.name, model.info, **where, health=health, arithmetic=card.arithmetic))
        if model.info is not None:
            _warn_of_missing(model.info)

    def _connect(self) -> RedisClient:
        return connect(self._address, decode=False, retries=0, name=self._client_name)

    @property
    def _client_name(self) -> str:
        return f"penstock-worker-{self.config.name}"

    async def _serve(self, model: Model, card: ModelCard) -> None:
        redis = self._connect()
        block_s = self.config.block_ms / 1000
        blocking = connect_blocking(self._address, decode=False, block_s=block_s, name=self._client_name)
        driver = EngineDriver(model.engine)
        await driver.start()
        self._redis, self._driver = redis, driver
        self._memory = model.memory
        self.metrics.set_model(self.config.names_of(model.name)[0], model.info)
        grammars = None if model.grammars is None else MeasuredGrammars(model.grammars, self.metrics)
        max_model_len = None if model.info is None else model.info.max_model_len
        preparer = Preparer(model.text, self.config, grammars, max_model_len)
        device = None if model.info is None else device_of(model.info)
        self._session = Session(
            redis,
            blocking,
            self.config,
            card,
            device,
            driver,
            preparer,
            model.defaults,
            self.metrics,
            self.readiness,
            Refusals((redis, blocking), self._address, self.config.refused_drain_after_s, self.readiness),
            self._spans_of(model),
        )
        async with aclosing(redis), aclosing(blocking):  # also where a second stop cuts the rest short
            try:
                await self._session.run(self._stop)
            finally:
                try:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(ENGINE_STOP_TIMEOUT_S):
                            await driver.stop()
                finally:
                    self._redis = None  # later scrapes must not connect again: nobody would close the connection
                    await self._refresh.run()  # a scrape that is under way must end before the client is closed

    def _is_alive(self) -> bool:
        return self._session is None or not self._session.has_engine_ended

    async def _scrape(self, accept: str) -> tuple[bytes, str]:
        await self._refresh.run()
        return render(self.metrics.registry, accept)

    async def _refresh_metrics(self) -> None:
        """Scrapes share one refresh, so they never take more than one connection to Redis."""
        if self._driver is not None:
            self.metrics.set_engine(self._driver.stats, self._memory())
        self.metrics.set_service(
            num_live=len(self._session.requests) if self._session is not None else 0,
            is_ready=self.readiness.is_ready,
            trouble=self.readiness.trouble,
        )
        if self._redis is not None:
            with suppress(TimeoutError, *retries.REDIS_ERRORS):  # on failure the gauges keep their last values
                async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                    await self._measure_queue(self._redis)

    async def _measure_queue(self, redis: RedisClient) -> None:
        """Reads the queue's gauges. One worker measures for all: otherwise each worker would list all others."""
        pipeline = redis.pipeline(transaction=False)
        pipeline.hgetall(keys.load(self.config.queue))
        pipeline.xlen(keys.dead(self.config.queue))
        pipeline.xlen(keys.malformed(self.config.queue))
        load, letters, malformed = await pipeline.execute(raise_on_error=False)
        if isinstance(letters, int) and isinstance(malformed, int):
            self.metrics.set_letters(request=letters, malformed=malformed)
        with suppress(ValueError):  # nobody has measured yet
            self.metrics.set_load(QueueLoad.of({} if isinstance(load, Exception) else load))


async def _loaded(model: asyncio.Future[Model]) -> Model:
    try:
        return await model
    except WorkerError:
        raise
    except Exception as error:
        raise EngineFailed(f"the model could not be loaded: {error}") from error


def _warn_of_missing(info: EngineInfo) -> None:
    """Warns of what makes an engine slow to serve or to start, of lost memory, and of lengths beyond its model's."""
    if info.exceeded_len is not None:
        _log.warning("beyond_models_length", max_model_len=info.max_model_len, of_model=info.exceeded_len)
    if info.page_padding >= _MUCH_PADDING:
        _log.warning("padded_pages", share=info.page_padding)
    if info.fallback is not None:
        _log.warning("no_native_kernels", why=info.fallback, hint=NO_COMPILER_HINT)
    if info.unkept is not None:
        _log.warning("compilations_not_kept", why=info.unkept, hint="set compile_cache_dir to a folder it may write to")


def _warn_of_ignored(defaults: GenerationDefaults) -> None:
    """Warns of recommended settings that are ignored: answers differ from those of the model's authors."""
    if defaults.ignored:
        _log.warning("generation_config_ignored", fields=list(defaults.ignored))


async def _run_in_daemon_thread(function: Callable[[], Model]) -> Model:
    """Runs `function` in a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Model] = loop.create_future()

    def settle(result: Model | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        elif result is not None:
            done.set_result(result)

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as caught:  # the waiting side decides
            error = caught
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="penstock-load", daemon=True).start()
    return await done

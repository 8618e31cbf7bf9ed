"""Runs `penstock worker`: turns settings into a service, and signals into a drain."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import structlog

import penstock.engine as engine_package
from penstock import stopping
from penstock.cli.shared.errors import CommandFailed, exit_status_of
from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineError
from penstock.engine.loading.identity import identify
from penstock.engine.loading.naming.resolving import local, resolve
from penstock.engine.loading.source import open_checkpoint
from penstock.engine.progress import BYTES
from penstock.engine.text.bridges.limits import rules_of
from penstock.engine.text.reply import TEXT_RULES
from penstock.local.progress import Say, shown
from penstock.protocol.redis import tls
from penstock.protocol.redis.renewal import keep_looking
from penstock.protocol.tasks import end_tasks
from penstock.protocol.telemetry.loading import load_telemetry
from penstock.serving import garbage
from penstock.serving.listening import listen
from penstock.serving.log_lines import LogLines, Rank
from penstock.stopping import Stopping
from penstock.worker.config import WorkerConfig
from penstock.worker.logs import is_for_people, service_logs
from penstock.worker.service import Model, WorkerService
from penstock.worker.settings import Settings, variable
from penstock.worker.settings_loading import SettingsError, flag

_log = structlog.get_logger(__name__)

_CANNOT_LISTEN = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES, socket.EAI_NONAME, socket.EAI_AGAIN)


def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT, then drains.

    Raises:
        SettingsError: a setting is missing or out of range, or the model's files can't be read.
        TelemetryUnavailable: `otel` is set, and can't be provided.
        WorkerError: the service could not start, or ended other than by a drain.
        CommandFailed: the health port is taken.
    """
    is_json = not is_for_people(settings.log_format, sys.stderr)
    with service_logs(settings.log_level, settings.log_format) as lines, _fatal_line(lines, is_json=is_json):
        if settings.model is None:
            raise SettingsError(
                f"no model is set: give {flag('model')} or {variable('model')}; `demo` ships with Penstock"
            )
        _look_at(settings.model)
        load = partial(load_model, settings.model, settings.engine_config())
        config = _with_free_port(settings.worker_config(), is_set="health_port" in settings.model_fields_set)
        telemetry = load_telemetry("penstock-worker", config.name) if settings.otel else None
        with stopping.current() as signals:
            asyncio.run(_run(WorkerService(config, settings.address(), load, telemetry), signals))


def _look_at(model: str) -> None:
    """Refuses a path that no model can be loaded from, before Redis is waited for. What is fetched is judged later.

    Raises:
        SettingsError: there is no such model.
    """
    is_path = model.startswith((".", "/", "~"))
    try:
        path = local(model)
        if path is not None:
            _ = open_checkpoint(path).fields
        elif is_path:
            resolve(model)
    except EngineError as error:
        raise SettingsError(f"{flag('model')} {model}: {error}") from error


def _with_free_port(config: WorkerConfig, *, is_set: bool) -> WorkerConfig:
    """Gives a second worker of this machine another health port, unless one was asked for."""
    if is_set or config.health_port is None:
        return config
    try:
        listen(config.health_host, config.health_port).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return config  # the health server will say it
        _log.info("health_port_taken", port=config.health_port, instead="any free one")
        return replace(config, health_port=0)
    return config


@contextmanager
def _fatal_line(lines: LogLines, *, is_json: bool) -> Iterator[None]:
    """Logs why the worker failed as the last line, as JSON if the log is JSON. Then nothing is left to print."""
    try:
        yield
    except Exception as error:
        status = exit_status_of(error)
        if is_json or status is None:
            trace = {} if status is not None else {"exc_info": True}
            _log.critical("worker_failed", error=str(error), exit_status=status or 1, **trace)
        else:
            lines.put(f"penstock: {error}", Rank.VITAL)
        raise SystemExit(status or 1) from error


def load_model(model: str, config: EngineConfig, say: Say | None = None) -> Model:
    """Loads and warms up a model, and shows progress."""
    path = local(model)
    if path is None:
        with shown(f"fetching {model}", BYTES, say) as report:
            path = resolve(model, report)
    with garbage.paused():
        with shown("loading the model", BYTES, say) as report:
            engine = engine_package.Engine.from_checkpoint(path, config, report)
        with shown("warming up", "shapes", say) as report:
            engine.warm_up(report)
        garbage.settle()
    tokenizer = engine.tokenizer
    limits = tokenizer.limits()
    identity = identify(
        path,
        tokenizer.templates,
        tokenizer.rules(),
        limits=limits,
        template_rules=rules_of(limits),
        reading_rules=tokenizer.reading_rules,
        text_rules=TEXT_RULES,
        generation_defaults=engine.defaults.spelled(),
        generation_source=engine.defaults.source,
        logprobs_mode=config.logprobs_mode,
        held_as=config.weights,
        activations=config.activations,
    )
    return Model(
        engine,
        tokenizer,
        engine.defaults,
        model,
        engine.describe(),
        engine.grammars,
        identity,
        tokenizer.chat_format,
        engine.device_memory,
    )


async def _run(service: WorkerService, signals: Stopping) -> None:
    looking = asyncio.create_task(keep_looking(tls.look_again))
    try:
        with signals.serving(asyncio.get_running_loop(), service.request_drain, _reload):
            await service.run()
    except OSError as error:
        if error.errno not in _CANNOT_LISTEN:
            raise
        raise CommandFailed(
            f"the health server cannot listen: {error}; set {flag('health_port')} or {flag('health_host')}"
        ) from error
    finally:
        await end_tasks([looking])


def _reload() -> None:
    """Rereads TLS files now, to report unusable ones; new connections to Redis read a worker's files again anyway."""
    tls.look_again()
    _log.info("reloaded")

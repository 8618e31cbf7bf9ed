"""What `penstock worker` runs: settings into a service, signals into a drain."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import sys
from functools import partial
from pathlib import Path

from penstock.engine import Engine, EngineConfig
from penstock.engine.demo import MODEL_DIR
from penstock.worker import garbage
from penstock.worker.cli.errors import CommandFailed
from penstock.worker.cli.progress import shown
from penstock.worker.logs import configure_logs
from penstock.worker.service import Model, WorkerService
from penstock.worker.settings import DEMO_MODEL, Settings, SettingsError, flag, variable

_CANNOT_LISTEN = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES, socket.EAI_NONAME, socket.EAI_AGAIN)


def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT, then drains.

    Raises:
        SettingsError: a setting is missing or out of range.
        WorkerError: the service could not start, or ended for another reason than a drain.
        CommandFailed: the health port is taken.
    """
    if settings.model is None:
        raise SettingsError(f"no model is set: give {flag('model')} or {variable('model')}; `demo` ships with Penstock")
    load = partial(load_model, settings.model, settings.engine_config())
    service = WorkerService(settings.worker_config(), settings.redis_url, load)
    configure_logs(settings.log_level, settings.log_format, sys.stderr)
    asyncio.run(_run(service))


def load_model(model: str, config: EngineConfig) -> Model:
    """Loads and warms up, showing how far it is."""
    checkpoint: str | Path = MODEL_DIR if model == DEMO_MODEL else model
    with shown("loading the model") as report:
        engine = Engine.from_checkpoint(checkpoint, config, report)
    with shown("warming up") as report:
        engine.warm_up(report)
    garbage.settle()
    return Model(engine, engine.tokenizer, engine.defaults)


async def _run(service: WorkerService) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.request_drain)
    try:
        await service.run()
    except OSError as error:
        if error.errno not in _CANNOT_LISTEN:
            raise
        raise CommandFailed(
            f"the health server cannot listen: {error}; set {flag('health_port')} or {flag('health_host')}"
        ) from error

"""One worker in a process of its own, to be killed and frozen."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Protocol

from penstock.local.embedded import dies_with_parent
from penstock.tools.chaos.fake_engine import FakeEngine, fake_model
from penstock.worker.config import WorkerConfig
from penstock.worker.logs import configure_logs
from penstock.worker.service import WorkerService
from penstock.worker.settings_loading import flag

_FORKS = multiprocessing.get_context("forkserver")
_ROOT = Path(__file__).parents[3]  # the installed package's, or the source tree's
_PR_SET_PDEATHSIG = 1


class WorkerProcess(Protocol):
    """A running worker with any engine."""

    def poll(self) -> int | None:
        """Returns the exit status, negative for a signal; None: it runs."""

    def send(self, number: signal.Signals) -> None: ...

    def wait(self, timeout_s: float) -> int | None:
        """Waits for the end; returns the exit status, None if the worker still runs after `timeout_s`."""


class FakeWorker:
    """A worker with the fake engine. It is forked from a process that has done the imports, which take seconds.

    Args:
        url: of Redis.
        log: file for its log, as JSON lines.
        engine: arguments of `FakeEngine`.
        config: arguments of `WorkerConfig`.
    """

    def __init__(self, url: str, log: Path, engine: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        start_fork_server()
        self._process = _FORKS.Process(target=_run, args=(url, log, dict(engine), dict(config)), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def send(self, number: signal.Signals) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def wait(self, timeout_s: float) -> int | None:
        self._process.join(timeout_s)
        return self._process.exitcode


class ModelWorker:
    """Runs `penstock worker` itself, with a model.

    Args:
        url: of Redis.
        log: file for its log.
        settings: by name, as in `penstock.worker.settings.Settings`.
        program: arguments of Python that run the command line.
    """

    def __init__(
        self, url: str, log: Path, settings: Mapping[str, Any], program: Sequence[str] = ("-m", "penstock")
    ) -> None:
        values = {"redis_url": url, "health_port": None, "log_format": "json", **settings}
        flags = [part for name, value in values.items() for part in (flag(name), _text(value))]
        with log.open("w") as stream:
            self._process = subprocess.Popen(  # noqa: S603  this very program
                [*dies_with_parent(), sys.executable, *program, "worker", *flags],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,  # the harness handles Ctrl-C and then stops its workers
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


def start_fork_server(module: str = __name__) -> None:
    """Starts the process that workers are forked from, unless it runs; it imports `module` first."""
    _FORKS.set_forkserver_preload([module])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), before] if before else [str(_ROOT)])
    try:
        forkserver.ensure_running()  # it finds its modules through this variable alone
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _text(value: object) -> str:
    return "none" if value is None else str(value)


def end_with_harness() -> None:
    """Ends this forked process together with the harness that started the fork server."""
    if sys.platform == "linux":
        # The parent is the fork server, which ends once nobody holds its pipe any more. Only the harness should hold
        # it: workers inherit the pipe too, and would keep alive the server whose death they wait for.
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # noqa: SLF001
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the harness handles Ctrl-C


def _run(url: str, log: Path, engine: dict[str, Any], config: dict[str, Any]) -> None:
    end_with_harness()
    with log.open("w", buffering=1) as stream:
        os.dup2(stream.fileno(), 2)  # Python's own messages, such as why it ends
        configure_logs("info", "json", stream)
        asyncio.run(_serve(url, engine, config))


async def _serve(url: str, engine: dict[str, Any], config: dict[str, Any]) -> None:
    service = WorkerService(WorkerConfig(**config), url, lambda _: fake_model(FakeEngine(**engine)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.request_drain)
    await service.run()

"""Workers with the fake engine as separate processes, for tests that kill or freeze them."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.tools.chaos.process import FakeWorker
from tests.support.patience import WAIT_S
from tests.support.programs.worker_harness import QUICK


class WorkerProcess:
    """A running worker while the `with` block lasts; killed at its end if nothing else ended it."""

    def __init__(
        self,
        url: str,
        log: Path,
        *,
        engine: dict[str, Any] | None = None,
        make: Callable[[str, Path, Mapping[str, Any], Mapping[str, Any]], FakeWorker] = FakeWorker,
        **config: Any,
    ) -> None:
        self._log = log
        self._make: Callable[[], FakeWorker] = partial(make, url, log, engine or {}, {**QUICK, **config})
        self._worker: FakeWorker | None = None

    def __enter__(self) -> WorkerProcess:
        self._worker = self._make()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.send(signal.SIGCONT)
        self.kill()

    def send(self, number: signal.Signals) -> None:
        assert self._worker is not None
        self._worker.send(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait(WAIT_S)

    def wait(self, timeout_s: float) -> int | None:
        """Returns the exit status; None if the process is still there after `timeout_s`."""
        assert self._worker is not None
        return self._worker.wait(timeout_s)

    def limit_descriptors(self, count: int) -> None:
        """Bounds the number of descriptors (files, sockets) that it may have from now on."""
        assert self._worker is not None
        resource.prlimit(self._worker.pid, resource.RLIMIT_NOFILE, (count, count))

    def log(self) -> str:
        """All that it has written so far, to its log and to stderr."""
        return self._log.read_text() if self._log.exists() else ""

    def events(self) -> list[dict[str, Any]]:
        """Returns what it has logged so far, without a line that is being written."""
        lines = self.log().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]

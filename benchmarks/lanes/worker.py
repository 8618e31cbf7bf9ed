"""A worker in a process of its own, with the real engine on a device that only takes time.

SIGUSR1 makes its device slow, SIGUSR2 as fast as before.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.parts.paced_engine import Device, paced_engine
from penstock.engine import Engine
from penstock.tools.chaos.process import end_with_harness, start_fork_server
from penstock.worker.config import WorkerConfig
from penstock.worker.logs import configure_logs
from penstock.worker.service import Model, WorkerService

_FORKS = multiprocessing.get_context("forkserver")
SLOWNESS = 5.0


@dataclass(frozen=True, slots=True)
class PacedWorker:
    """Settings of a paced worker."""

    name: str
    queue: str
    max_num_seqs: int
    device: Device
    max_batch_tokens: int = 512
    max_model_len: int = 1024
    num_pages: int | None = None  # None: enough, and prefixes are not cached
    config: dict[str, Any] = field(default_factory=dict)  # further arguments of `WorkerConfig`

    def start(self, url: str, log: Path) -> BaseProcess:
        """Forks the worker from a process that has done the imports, which take seconds."""
        start_fork_server(__name__)
        process = _FORKS.Process(target=_run, args=(url, log, self), daemon=True)
        process.start()
        return process

    def engine(self) -> Engine:
        return paced_engine(
            self.max_num_seqs,
            self.max_batch_tokens,
            self.device,
            max_model_len=self.max_model_len,
            num_pages=self.num_pages,
        )


async def serve(url: str, worker: PacedWorker) -> None:
    engine = worker.engine()
    model = Model(engine, engine.tokenizer, engine.defaults)
    config = WorkerConfig(queue=worker.queue, name=worker.name, health_port=None, drain_timeout_s=1.0, **worker.config)
    service = WorkerService(config, url, lambda _: model)
    loop = asyncio.get_running_loop()
    runner: Any = engine._runner  # noqa: SLF001
    loop.add_signal_handler(signal.SIGTERM, service.request_drain)
    loop.add_signal_handler(signal.SIGUSR1, setattr, runner, "slowness", SLOWNESS)
    loop.add_signal_handler(signal.SIGUSR2, setattr, runner, "slowness", 1.0)
    await service.run()


def _run(url: str, log: Path, worker: PacedWorker) -> None:
    end_with_harness()
    with log.open("w", buffering=1) as stream:
        os.dup2(stream.fileno(), 2)
        configure_logs("warning", "console", stream)
        asyncio.run(serve(url, worker))

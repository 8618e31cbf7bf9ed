"""Worker processes, each behind a proxy of its own. A killed one is replaced."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.tools.chaos.history import ChaosEvent, EventKind, History
from penstock.tools.chaos.process import FakeWorker, ModelWorker, WorkerProcess
from penstock.tools.chaos.proxy import Proxy, Watcher
from penstock.tools.chaos.site import Site

POLL_S = 0.05
END_TIMEOUT_S = 120.0  # generous, for a machine that is busy with other work
RESPAWN_S = 0.1  # from a kill to the next worker


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """Settings of the workers. `settings` is by name, as in `WorkerConfig` and, with a model, `Settings`."""

    queue: str
    logs: Path
    model: str | None  # None: the fake engine
    settings: Mapping[str, Any]
    fake_engine: Mapping[str, Any] = field(default_factory=dict)

    def has_joined(self, name: str) -> bool:
        """Checks whether a worker has joined its queue: before that, a signal may end it while it still loads."""
        log = self._log(name)
        return log.exists() and '"joined"' in log.read_text(errors="replace")

    def spawn(self, name: str, url: str) -> WorkerProcess:
        settings = {**self.settings, "queue": self.queue, "name": name}
        log = self._log(name)
        if self.model is None:
            return FakeWorker(url, log, self.fake_engine, {"health_port": None, **settings})
        return ModelWorker(url, log, {**settings, "model": self.model})

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"


@dataclass(slots=True)
class Slot:
    """A place for a succession of workers."""

    index: int
    proxy: Proxy
    name: str = ""
    process: WorkerProcess | None = None
    generation: int = 0
    is_frozen: bool = False
    waking: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return self.process is not None and not self.is_frozen


class Fleet:
    """Starts, kills, freezes and wakes workers. Use `async with`; on exit all of them have ended.

    Args:
        site: where the server is.
        setup: makes workers.
        num_workers: number of slots.
        watch: makes the watcher of a slot's traffic.
        history: records what was done.
    """

    def __init__(
        self,
        site: Site,
        setup: WorkerSetup,
        num_workers: int,
        watch: Callable[[Slot], Watcher],
        history: History,
    ) -> None:
        self._site = site
        self._setup = setup
        self._history = history
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.slots = [Slot(index, Proxy(*site.host_and_port)) for index in range(num_workers)]
        self._watch = watch

    async def __aenter__(self) -> Fleet:
        for slot in self.slots:
            await slot.proxy.start(self._watch(slot))
            self._spawn(slot)
        self._keep(asyncio.create_task(self._supervise()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self.slots:
            if slot.process is not None:
                slot.process.send(signal.SIGKILL)
        for slot in self.slots:
            if slot.process is not None:
                await asyncio.to_thread(slot.process.wait, END_TIMEOUT_S)
            await slot.proxy.stop()

    def kill(self, slot: Slot) -> None:
        """Sends SIGKILL; what is still on its way through the proxy is lost as well."""
        if slot.process is None:
            return
        slot.process.send(signal.SIGKILL)
        slot.proxy.cut()
        self._note("kill", slot)
        self._reap(slot)
        self._keep(asyncio.create_task(self._respawn(slot)))

    def freeze(self, slot: Slot, wait_over: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Sends SIGSTOP, then SIGCONT once `wait_over` returns, which ends the task."""
        if slot.waking is not None:
            return slot.waking
        if slot.process is not None:
            slot.process.send(signal.SIGSTOP)
        slot.is_frozen = True
        self._note("freeze", slot)
        slot.waking = self._keep(asyncio.create_task(self._wake(slot, wait_over)))
        return slot.waking

    async def wait_awake(self) -> None:
        """Waits until no worker is frozen."""
        await asyncio.gather(*(slot.waking for slot in self.slots if slot.waking is not None))

    async def drain(self) -> None:
        """Sends SIGTERM to all workers once none is frozen. If one had joined and exits with a status other than 0,
        that is recorded in `History.troubles`.
        """
        await self.wait_awake()
        self._is_closing = True
        for slot in self.slots:
            if slot.process is not None:
                slot.process.send(signal.SIGTERM)
        for slot in self.slots:
            if slot.process is None:
                continue
            status = await asyncio.to_thread(slot.process.wait, END_TIMEOUT_S)
            if status != 0 and (status != -signal.SIGTERM or self._setup.has_joined(slot.name)):
                self._history.troubles.append(f"told to drain, worker {slot.name} ended with status {status}")

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _note(self, kind: EventKind, slot: Slot) -> None:
        self._history.events.append(ChaosEvent(kind, slot.name, time.monotonic()))

    def _spawn(self, slot: Slot) -> None:
        slot.generation += 1
        slot.name = f"w{slot.index}-{slot.generation}"
        slot.is_frozen, slot.waking = False, None
        slot.process = self._setup.spawn(slot.name, self._site.url_through(slot.proxy.port))
        self._note("start", slot)

    def _reap(self, slot: Slot) -> None:
        if slot.process is not None:
            process, slot.process = slot.process, None
            self._keep(asyncio.create_task(_wait(process)))

    async def _respawn(self, slot: Slot) -> None:
        await asyncio.sleep(RESPAWN_S)
        if not self._is_closing:
            self._spawn(slot)

    async def _wake(self, slot: Slot, wait_over: Callable[[], Awaitable[None]]) -> None:
        process = slot.process
        try:
            await wait_over()
        finally:
            if process is not None and slot.process is process:
                process.send(signal.SIGCONT)
                slot.is_frozen, slot.waking = False, None
                self._note("wake", slot)

    async def _supervise(self) -> None:
        """Replaces workers that ended without being told to, like killed ones, and records each as a trouble."""
        while True:
            await asyncio.sleep(POLL_S)
            for slot in self.slots:
                status = None if slot.process is None or self._is_closing else slot.process.poll()
                if status is not None:
                    self._history.troubles.append(f"worker {slot.name} ended by itself with status {status}")
                    self._note("end", slot)
                    self._reap(slot)
                    self._keep(asyncio.create_task(self._respawn(slot)))


async def _wait(process: WorkerProcess) -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.to_thread(process.wait, END_TIMEOUT_S)

"""The whole service on this machine in one piece: a server of its own, workers, a gateway, one log, one end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog

from penstock.local.data_folder import DataFolder
from penstock.local.embedded import EmbeddedServer
from penstock.local.programs import Program
from penstock.protocol.tasks import end_tasks

_FSYNC = ("--appendfsync", "everysec")  # nothing is lost when a process dies; `always` writes to disk for each command

_log = structlog.get_logger(__name__)


class LocalService:
    """Runs workers and a gateway until told to stop. The gateway drains first, as its answers need the workers.

    Args:
        workers: settings of each worker.
        gateway: settings of the gateway.
        ready: called with the gateway's URL once it listens and a worker has joined.
    """

    def __init__(
        self,
        workers: Sequence[Mapping[str, Any]],
        gateway: Mapping[str, Any],
        ready: Callable[[str], object],
    ) -> None:
        self._ready = ready
        self._stopping, self._aborting = asyncio.Event(), asyncio.Event()
        self._is_ready = False
        self._url = ""
        self._gateway = Program("gateway", "gateway", gateway, self._hear_gateway)
        self._workers = [
            Program(f"worker-{number}", "worker", settings, self._hear_worker)
            for number, settings in enumerate(workers, 1)
        ]

    @property
    def is_aborted(self) -> bool:
        return self._aborting.is_set()

    def stop(self) -> None:
        """Begins the drain; a second call ends it."""
        if self._stopping.is_set():
            self._aborting.set()
        self._stopping.set()

    def reload(self) -> None:
        for program in (self._gateway, *self._workers):
            program.reload()

    async def run(self, *beside: asyncio.Task[None]) -> None:
        """Serves until told to stop, or until a task of `beside` fails.

        Raises:
            ProgramEnded: the gateway ended before it served, or a worker before any of them had.
            Exception: what a task of `beside` failed with.
        """
        gateway = asyncio.create_task(self._gateway.keep(), name="gateway")
        workers = [asyncio.create_task(each.keep(), name=each.name) for each in self._workers]
        told = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({told, gateway, *workers, *beside}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain([self._gateway], [gateway])
            await self._drain(self._workers, workers)
            for task in (*beside, gateway, *workers):
                if task.done():
                    task.result()
        finally:
            await end_tasks([told, gateway, *workers])

    async def _drain(self, programs: Sequence[Program], tasks: Sequence[asyncio.Task[None]]) -> None:
        for program in programs:
            program.stop()
        aborting = asyncio.create_task(self._aborting.wait())
        ending = asyncio.create_task(asyncio.wait(tasks))
        await asyncio.wait({ending, aborting}, return_when=asyncio.FIRST_COMPLETED)
        if self._aborting.is_set():
            for program in programs:
                program.kill()
            await asyncio.wait(tasks)
        await end_tasks([aborting, ending])

    def _hear_gateway(self, said: Mapping[str, Any]) -> None:
        if said["event"] == "listening":
            self._gateway.is_sound = True
            self._url = str(said["url"])
            self._announce()

    def _hear_worker(self, said: Mapping[str, Any]) -> None:
        if said["event"] == "joined":
            for worker in self._workers:  # their settings are the same
                worker.is_sound = True
            self._announce()

    def _announce(self) -> None:
        if self._url and not self._is_ready and all(worker.is_sound for worker in self._workers):
            self._is_ready = True
            self._ready(self._url)


@asynccontextmanager
async def kept_server(folder: DataFolder) -> AsyncIterator[tuple[EmbeddedServer, asyncio.Task[None]]]:
    """Runs a server on the data of `folder`, and starts it again when it ends. The task fails when that fails.

    Raises:
        EmbeddedServerError: it could not start.
    """
    server = EmbeddedServer(port=folder.last_port(), data_dir=folder.data, arguments=_FSYNC)
    with server:
        keeping = asyncio.create_task(_keep(server), name="server")
        try:
            yield server, keeping
        finally:
            await end_tasks([keeping])


async def _keep(server: EmbeddedServer) -> None:
    while True:
        await _ended(server.pid)
        _log.warning("program_ended", program="redis", next="it starts again")
        server.kill()  # reaps it
        server.start()


async def _ended(pid: int) -> None:
    """Waits for the end of a child process, and leaves its exit status to its parent."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)

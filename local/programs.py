"""Keeps programs of `penstock` running, and merges their logs."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import structlog

from penstock.local.processes import running
from penstock.protocol.tasks import end_tasks

RESTART_PAUSE_S = 1.0
_LAST_WORDS_S = 1.0  # for the log of a program that has ended; a process that it left behind may hold the pipe

_log = structlog.get_logger(__name__)

Hear: TypeAlias = Callable[[Mapping[str, Any]], object]
"""Called with each line of a log that is an object of JSON."""


class ProgramEnded(Exception):
    """A program ended before it served. The message has its last words, and `exit_status` its exit status."""

    def __init__(self, name: str, status: int, last: str) -> None:
        super().__init__(f"{name} ended with status {status} before it served{': ' if last else ''}{last}")
        self.exit_status = status if status > 0 else 1


class Program:
    """Runs `penstock COMMAND` with `settings`, and runs it again when it ends, once it is known to be sound.

    Args:
        name: what its lines in the log begin with.
        command: of `penstock`.
        settings: its options.
        hear: called with its log.
    """

    def __init__(self, name: str, command: str, settings: Mapping[str, Any], hear: Hear) -> None:
        self.name = name
        self.is_sound = False  # set by its owner once its settings have proved right
        self._command = command
        self._settings = {**settings, "log_format": "json"}
        self._hear = hear
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = asyncio.Event()
        self._last = ""

    async def keep(self) -> None:
        """Keeps the program running, and returns once it was stopped.

        Raises:
            ProgramEnded: it ended before it was known to be sound.
        """
        while not self._is_stopping.is_set():
            async with running(self._command, self._settings, stderr=asyncio.subprocess.PIPE) as process:
                self._process = process
                status = await self._follow(process)
                self._process = None
            if self._is_stopping.is_set():
                return
            if not self.is_sound:
                raise ProgramEnded(self.name, status, self._last)
            _log.warning("program_ended", program=self.name, exit_status=status, next="it starts again")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopping.wait(), RESTART_PAUSE_S)

    def stop(self) -> None:
        """Tells it to drain."""
        self._is_stopping.set()
        self._signal(asyncio.subprocess.Process.terminate)

    def kill(self) -> None:
        self._is_stopping.set()
        self._signal(asyncio.subprocess.Process.kill)

    def reload(self) -> None:
        """Tells it to reread what may have changed on disk."""
        self._signal(lambda process: process.send_signal(signal.SIGHUP))

    def _signal(self, send: Callable[[asyncio.subprocess.Process], object]) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                send(self._process)

    async def _follow(self, process: asyncio.subprocess.Process) -> int:
        assert process.stderr is not None  # noqa: S101  it is a pipe
        reading = asyncio.create_task(self._read(process.stderr))
        try:
            status = await process.wait()
            await asyncio.wait({reading}, timeout=_LAST_WORDS_S)
        finally:
            await end_tasks([reading])
        return status

    async def _read(self, lines: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await lines.readline()
            except ValueError:  # the line is longer than any of ours: left out
                continue
            if not line:
                return
            self._pass_on(line.decode(errors="replace").rstrip("\n"))

    def _pass_on(self, line: str) -> None:
        try:
            said = json.loads(line)
            event, level = str(said.pop("event")), str(said.pop("level"))
        except (ValueError, KeyError, TypeError, AttributeError):  # written by a library or the interpreter
            if line.strip():
                self._last = line
                _log.info(line, program=self.name)
            return
        said.pop("timestamp", None)
        self._last = str(said.get("error", event))
        rank = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
        _log.log(rank, event, **{**said, "program": self.name})
        self._hear({**said, "event": event})

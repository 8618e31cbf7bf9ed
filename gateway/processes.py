"""Runs several identical processes, and replaces each one that ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import structlog

from penstock.serving import log_lines
from penstock.stopping import Stopping

_log = structlog.get_logger(__name__)

RESTART_INTERVAL_S = 1.0
"""Time between two starts in one place, so that a process that ends at once does not use up a processor."""

ABORT = signal.SIGQUIT
"""Sent by the parent process: end at once."""


ABORTED = 130
"""Exit status of a process that was told to stop twice."""


class ProcessMain(Protocol):
    def __call__(self, place: int, lifeline: int, signals: Stopping) -> int:
        """Runs the process in `place`; returns its exit status. It drains on SIGTERM, and once `lifeline` can be read:
        then its parent is gone. It ends at once on `ABORT`.
        """


def keep_running(
    count: int, work: ProcessMain, signals: Stopping, is_final: Callable[[int], bool] = lambda _: False
) -> int:
    """Forks `count` processes and replaces those that end, until SIGTERM or SIGINT, or until one ends with an exit
    status that `is_final`. Then it tells all of them to end, and waits. It passes on SIGHUP.

    They are forked from a process that does nothing else, so later ones are like the first. Call it without other
    threads and without an event loop.

    Returns:
        The highest exit status of the processes that were told to stop and of the final one; 128 plus the signal's
        number for one killed meanwhile.
    """
    with _blocked(signals.numbers | {signal.SIGCHLD}), signals.waited_for():
        return _Processes(work, signals, is_final).run(count)


class _Processes:
    def __init__(self, work: ProcessMain, signals: Stopping, is_final: Callable[[int], bool]) -> None:
        self._work = work
        self._signals = signals
        self._is_final = is_final
        self._awaited = signals.numbers | {signal.SIGCHLD}
        self._places: dict[int, int] = {}  # by process id
        self._started_s: dict[int, float] = {}  # by place
        self._due_s: dict[int, float] = {}  # by empty place: when it is filled
        self._is_stopping = False
        self._status = 0
        self._lifeline, self._held = os.pipe()

    def run(self, count: int) -> int:
        try:
            for place in range(count):
                self._start(place)
            while self._places or self._due_s:
                self._handle(self._await_signal())
        finally:
            os.close(self._held)
            os.close(self._lifeline)
        return self._status

    def _await_signal(self) -> int | None:
        """Returns the signal; None: a process is missing."""
        if not self._due_s:
            return signal.sigwait(self._awaited)
        timeout_s = max(0.0, min(self._due_s.values()) - time.monotonic())
        info = signal.sigtimedwait(self._awaited, timeout_s)
        return None if info is None else info.si_signo

    def _handle(self, number: int | None) -> None:
        if number == signal.SIGHUP:
            self._hang_up()
        elif number in self._signals.numbers:
            self._stop()
        for pid in list(self._places):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._ended(pid, os.waitstatus_to_exitcode(status))
        for place, due_s in list(self._due_s.items()):
            if time.monotonic() >= due_s:
                del self._due_s[place]
                self._start(place)

    def _stop(self) -> None:
        if self._signals.is_new_stop():
            self._tell(ABORT if self._is_stopping else signal.SIGTERM)
            self._is_stopping = True
            self._due_s.clear()

    def _hang_up(self) -> None:
        if self._is_stopping:
            return
        if self._signals.has_hung_up():
            self._stop()
        else:
            self._tell(signal.SIGHUP)

    def _tell(self, number: int) -> None:
        for pid in self._places:
            os.kill(pid, number)

    def _ended(self, pid: int, status: int) -> None:
        place = self._places.pop(pid)
        if self._is_final(status) and not self._is_stopping:
            self._stop()
        if status < 0 or not self._is_stopping:
            _log.error("process_ended", pid=pid, place=place, exit_status=status)
        if self._is_stopping:
            self._status = max(self._status, _reported(status))
            return
        self._due_s[place] = self._started_s[place] + RESTART_INTERVAL_S

    def _start(self, place: int) -> None:
        self._started_s[place] = time.monotonic()
        _flush()
        log_lines.before_fork()
        pid = os.fork()
        if pid == 0:
            _become(lambda: self._work(place, self._lifeline, self._signals), self._held, self._awaited)
        self._places[pid] = place
        _log.info("process_started", pid=pid, place=place)


def _reported(status: int) -> int:
    """Returns the exit status to report: for a signal, as shells do, except for the signal that is not an accident."""
    if status == -ABORT:  # if it has no handler, as at its start or end
        return ABORTED
    return 128 - status if status < 0 else status


def _become(work: Callable[[], int], held: int, awaited: frozenset[signal.Signals]) -> None:
    """Does the work in a process that was just forked, which then ends."""
    status = 1
    try:
        os.close(held)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        status = work()
    except Exception:
        _log.exception("process_failed")
    finally:
        log_lines.close()
        _flush()
        os._exit(status)


def _flush() -> None:
    with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
        sys.stdout.flush()
        sys.stderr.flush()


@contextmanager
def _blocked(numbers: frozenset[signal.Signals]) -> Iterator[None]:
    """Blocks signals, so that they wait until they are fetched."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

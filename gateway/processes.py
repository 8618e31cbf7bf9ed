"""Several processes that do the same, each of which is replaced when it ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import structlog

from penstock.gateway import log_lines
from penstock.stopping import Stopping

_log = structlog.get_logger(__name__)

RESTART_INTERVAL_S = 1.0
"""Between two starts in one place: one that ends at once is no reason to use up a processor."""

ABORT = signal.SIGQUIT
"""From the process that started the others: they are to end at once."""


ABORTED = 130
"""Exit status of who was told to stop twice."""


class Work(Protocol):
    def __call__(self, place: int, lifeline: int, signals: Stopping) -> int:
        """What the process in `place` does; its exit status. It drains on SIGTERM, and once `lifeline` can be read:
        then the process that started it is gone. It ends at once on `ABORT`.
        """


def keep_running(count: int, work: Work, signals: Stopping, is_final: Callable[[int], bool] = lambda _: False) -> int:
    """Forks `count` processes and replaces those that end, until SIGTERM or SIGINT, or until one ends with an exit
    status that `is_final`; then it tells all of them to end, and waits for it. SIGHUP it passes on.

    They are forked from a process that does nothing else, so one that is started later is like the first ones. Call it
    without other threads and without an event loop.

    Returns:
        The highest exit status of those that were told to stop, and of the one that was final; 128 and the number of
        the signal for one that was killed meanwhile.
    """
    with _blocked(signals.numbers | {signal.SIGCHLD}), signals.waited_for():
        return _Processes(work, signals, is_final).run(count)


class _Processes:
    def __init__(self, work: Work, signals: Stopping, is_final: Callable[[int], bool]) -> None:
        self._work = work
        self._signals = signals
        self._is_final = is_final
        self._awaited = signals.numbers | {signal.SIGCHLD}
        self._places: dict[int, int] = {}  # by process id
        self._started_s: dict[int, float] = {}  # by place
        self._due_s: dict[int, float] = {}  # by place that is empty: when it is filled
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
        """None: a place is to be filled."""
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
    """What is said of a process that ended so: a signal as shells say it, but for the one that is no accident."""
    if status == -ABORT:  # where it has no handler, as it begins or ends
        return ABORTED
    return 128 - status if status < 0 else status


def _become(work: Callable[[], int], held: int, awaited: frozenset[signal.Signals]) -> None:
    """Does the work in a process that was just forked, which then ends."""
    status = 1
    try:
        os.close(held)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; who started this one decides
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
    """So that signals wait until they are asked for."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

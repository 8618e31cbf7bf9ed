"""Output of log lines through a bounded queue and a writing thread, so that a blocked log neither ends nor delays
anything.

The log may be a pipe that nobody reads, a full disk, or a reader that is gone: lines wait, and are retried each second.
When the queue is full, lines are dropped, those of the lowest rank first, and counted. The descriptor is left as it is
(no O_NONBLOCK), as other processes share it.
"""

from __future__ import annotations

import enum
import io
import os
import signal
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TextIO

CAPACITY_BYTES = 8 * 2**20
"""Capacity for all waiting lines."""

CLOSE_PATIENCE_S = 2.0
"""Time for the lines that still wait at the end of the process."""

_RETRY_S = 1.0
_FORK_PATIENCE_S = 0.2
_LARGEST_WRITE_BYTES = 64 * 2**10


class Rank(enum.IntEnum):
    """Rank of a line: how full the queue may be before it is dropped."""

    PLAIN = 6  # eighths of the capacity
    WARNING = 7
    VITAL = 8  # errors, what an operator did, the last line


class LogLines:
    """Queues lines for a writing thread.

    Args:
        write: takes bytes, like `os.write`, and may block or raise OSError; called in its own thread.
        say_dropped: called in the writing thread with the number of lines dropped before the log accepted lines again;
            it may call `put`.
    """

    def __init__(self, write: Callable[[memoryview], int], say_dropped: Callable[[int], object]) -> None:
        self._write = write
        self._say_dropped = say_dropped
        self.num_dropped = 0
        self._num_told = 0
        self._forget()

    def _forget(self) -> None:
        """Resets the state at the start of a process, even a forked one: lines waiting in its parent are the
        parent's.
        """
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Rank, bytes]] = deque()
        self._num_bytes = 0
        self._written = 0  # bytes of the first of them
        self._thread: threading.Thread | None = None
        self._is_resting = False  # its thread ends once nothing waits

    def put(self, line: str, rank: Rank) -> bool:
        """Queues a line, without its line end, and never blocks. False: it was dropped."""
        if self._pid != os.getpid():
            self._forget()
        data = f"{line}\n".encode(errors="backslashreplace")
        with self._changed:
            if self._num_bytes + len(data) > CAPACITY_BYTES * rank // max(Rank):
                self.num_dropped += 1
                return False
            self._waiting.append((rank, data))
            self._num_bytes += len(data)
            self._is_resting = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="penstock-log", daemon=True)
                _start_without_signals(self._thread)
            self._changed.notify_all()
        return True

    def rest(self, patience_s: float) -> bool:
        """Ends the thread once nothing waits, until the next `put`. False: it still writes, or tries to."""
        with self._changed:
            thread, self._is_resting = self._thread, True
            self._changed.notify_all()
        if thread is not None:
            thread.join(patience_s)
        return thread is None or not thread.is_alive()

    def close(self, patience_s: float = CLOSE_PATIENCE_S) -> None:
        """Waits for queued lines to be written: half of the time for all, then only for those above the plain rank."""
        if self.rest(patience_s / 2):
            return
        with self._changed:
            head = list(self._waiting)[:1]  # it is being written
            kept = [each for each in list(self._waiting)[1:] if each[0] is not Rank.PLAIN]
            self.num_dropped += len(self._waiting) - len(head) - len(kept)
            self._waiting = deque([*head, *kept])
            self._num_bytes = sum(len(data) for _, data in self._waiting)
        self.rest(patience_s / 2)

    def _write_all(self) -> None:
        while (data := self._next()) is not None:
            try:
                self._advance(self._write(data))
            except OSError:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_resting, _RETRY_S)
                    if self._is_resting:
                        time.sleep(_RETRY_S / 20)

    def _next(self) -> memoryview | None:
        """Returns what to write now. None: this thread has to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_resting)
            if not self._waiting:
                self._thread = None
                return None
            return memoryview(self._waiting[0][1])[self._written :][:_LARGEST_WRITE_BYTES]

    def _advance(self, count: int) -> None:
        with self._changed:
            self._written += count
            if self._waiting and self._written >= len(self._waiting[0][1]):
                _, data = self._waiting.popleft()
                self._num_bytes -= len(data)
                self._written = 0
            news = self.num_dropped - self._num_told
            self._num_told += news
        if news:
            self._say_dropped(news)


def _start_without_signals(thread: threading.Thread) -> None:
    """Starts the thread with signals blocked: they are for the main thread, which may wait for them with `sigwait`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_current: LogLines | None = None


@contextmanager
def queued(stream: TextIO, say_dropped: Callable[[int], object]) -> Iterator[LogLines]:
    """Sends this process's log to `stream` through a queue during the block; the rest gets `CLOSE_PATIENCE_S` at its
    end.
    """
    global _current  # noqa: PLW0603 - a process has one log
    _current = lines = LogLines(_writer_to(stream), say_dropped)
    try:
        yield lines
    finally:
        close()
        _current = None


def _writer_to(stream: TextIO) -> Callable[[memoryview], int]:
    try:
        return partial(os.write, _own_end(stream.fileno()))
    except io.UnsupportedOperation:  # an in-memory stream

        def write(data: memoryview) -> int:
            stream.write(bytes(data).decode())
            return len(data)

        return write


def _own_end(descriptor: int) -> int:
    """Returns a descriptor for the writing thread, which may block.

    Other writers to a pipe in this process, such as XLA and libtpu, never block from then on: what does not fit is
    lost. For that, `descriptor` becomes another opening of the same pipe, with its own O_NONBLOCK.
    """
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return descriptor
        impatient = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # not Linux; somebody else's pipe; or nobody has it open any more
        return descriptor
    own = os.dup(descriptor)
    os.dup2(impatient, descriptor)
    os.close(impatient)
    return own


def num_dropped() -> int:
    """Returns the number of this process's log lines dropped so far."""
    return 0 if _current is None else _current.num_dropped


def before_fork() -> None:
    """Prepares a fork. It is best called while the process has just one thread."""
    if _current is not None:
        _current.rest(_FORK_PATIENCE_S)


def close() -> None:
    """Flushes the log of a forked process before it ends."""
    if _current is not None:
        _current.close()

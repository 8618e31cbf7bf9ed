"""What signals mean to `penstock worker`, `gateway` and `serve`, from the first line of Python to the last.

SIGTERM and SIGINT stop the service. The first one begins the drain. Another one within `SAME_STOP_S` counts as the same
stop, because npm, GNU `timeout` and a terminal's process group send it twice. A later one aborts. SIGHUP also stops the
service if the terminal that it was started at is gone; otherwise, the service reads again what may have changed on
disk. If SIGHUP or SIGINT was ignored when the process began (`nohup`, a shell's `&`), it stays ignored.

The handlers are Python's own, not those of an event loop. Before there is a loop, a stop ends the process at once, even
as process 1 of a container, to which the system delivers only signals with a handler. Once the loop is closed, they are
still there. The module imports only what is loaded anyway, so that it can run early.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Protocol

SAME_STOP_S = 1.0
"""Time within which a second stop counts as the first one, arriving twice."""

_HANG_UP_S = 0.25  # how long a terminal that hangs up may still look open
_SERVICES = ("worker", "gateway", "serve")

Act = Callable[[], object]


class Loop(Protocol):
    """The part of an event loop that is needed here. It is spelled out because importing asyncio takes a moment."""

    def call_soon_threadsafe(self, callback: Act, /) -> object: ...

    def call_later(self, delay: float, callback: Act, /) -> object: ...

    def add_reader(self, fd: int, callback: Act, /) -> object: ...

    def remove_reader(self, fd: int, /) -> object: ...


class Stopping:
    """What the signals of this process do. It is made before anything else, in the main thread."""

    def __init__(self) -> None:
        self._has_terminal = is_at_terminal()
        self._stop: Act = _nothing
        self._reload: Act = _nothing
        self._loop: Loop | None = None
        self._stopped_s: float | None = None
        self._is_over = False
        self._before: dict[signal.Signals, object] = {}

    @property
    def numbers(self) -> frozenset[signal.Signals]:
        """The signals that are heard."""
        return frozenset(self._before)

    @property
    def is_stopping(self) -> bool:
        return self._stopped_s is not None

    def listen(self) -> None:
        """Takes the signals, also those that the parent process had blocked: a mask is inherited.

        SIGTERM is the last: a process that catches it catches the others too.
        """
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            if number is signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)

    def give_up(self) -> None:
        """Gives the signals back the meaning that they had before `listen`."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def serving(self, loop: Loop, stop: Act, reload: Act) -> Iterator[None]:
        """Lets signals stop or reload a service within the block. After it they do nothing: the process ends anyway.

        Args:
            loop: calls the other two.
            stop: begins the drain; called again, it aborts.
            reload: reads again what may have changed.
        """
        self._loop, self._stop, self._reload = loop, stop, reload
        with self.waited_for(), _woken(loop):
            yield

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Makes signals do nothing after the block, as after `serving`. Within it, the caller may fetch them itself."""
        try:
            yield
        finally:
            self._is_over = True

    def is_new_stop(self, came_s: float | None = None) -> bool:
        """Notes a stop that came at that time (monotonic; None: now). False: it is the first one, arriving twice."""
        came_s = time.monotonic() if came_s is None else came_s
        if self._stopped_s is not None:
            return came_s - self._stopped_s >= SAME_STOP_S
        self._stopped_s = came_s
        return True

    def has_hung_up(self) -> bool:
        """Whether a SIGHUP that came just now is from a terminal that is gone; takes a moment where that may be."""
        if self._may_be_hanging_up():
            time.sleep(_HANG_UP_S)
        return self._is_hung_up()

    def _may_be_hanging_up(self) -> bool:
        return self._has_terminal and is_at_terminal()

    def _is_hung_up(self) -> bool:
        return self._has_terminal and not is_at_terminal()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        """Handles a signal, between any two instructions of the main thread."""
        if self._is_over:
            return
        if self._loop is not None:
            act, came_s = self._hang_up if number == signal.SIGHUP else self._end, time.monotonic()
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(lambda: act(came_s))  # a busy loop comes to it later
        elif number != signal.SIGHUP or self.has_hung_up():
            os._exit(0)  # nothing was begun

    def _hang_up(self, came_s: float) -> None:
        if self._loop is not None and self._may_be_hanging_up():
            self._loop.call_later(_HANG_UP_S, lambda: self._hung_up(came_s))
        else:
            self._hung_up(came_s)

    def _hung_up(self, came_s: float) -> None:
        if self.is_stopping:
            return
        if self._is_hung_up():
            self._end(came_s)
        else:
            self._reload()

    def _end(self, came_s: float) -> None:
        if self.is_new_stop(came_s):
            self._stop()


def _nothing() -> None: ...


@contextmanager
def _woken(loop: Loop) -> Iterator[None]:
    """Lets each signal wake the loop within the block. Otherwise, a signal that comes just before the loop begins to
    wait, or that the system gives to another thread, would be handled only when something else wakes the loop.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:  # the loop's own
        signal.set_wakeup_fd(before)
    loop.add_reader(reader, lambda: os.read(reader, 4096))
    try:
        yield
    finally:
        now = signal.set_wakeup_fd(-1)
        if now != writer:
            signal.set_wakeup_fd(now)
        loop.remove_reader(reader)
        os.close(reader)
        os.close(writer)


def is_at_terminal() -> bool:
    """Whether this process has a controlling terminal that can be opened."""
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK))
        return True
    return False


_current: Stopping | None = None


def listen_early(words: Sequence[str] = sys.orig_argv) -> None:
    """Takes the signals of this process if it was started as a service."""
    global _current  # noqa: PLW0603 - a process has one
    if _current is None and _is_service(words) and threading.current_thread() is threading.main_thread():
        _current = Stopping()
        _current.listen()


def _is_service(words: Sequence[str]) -> bool:
    for at, word in enumerate(words[:-1]):
        is_command = os.path.basename(word) == "penstock" and (at == 0 or words[at - 1] == "-m" or os.sep in word)  # noqa: PTH119
        if is_command:
            return words[at + 1] in _SERVICES
    return False


def end() -> None:
    """Makes the signals do nothing from now on, also while the interpreter ends, which would make them deadly again."""
    if _current is not None:
        for number in _current.numbers:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def current() -> Iterator[Stopping]:
    """Yields this process's `Stopping`, or one for the block alone if the process was not started as a service."""
    if _current is not None:
        yield _current
        return
    stopping = Stopping()
    stopping.listen()
    try:
        yield stopping
    finally:
        stopping.give_up()

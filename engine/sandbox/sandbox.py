"""Runs an untrusted program in processes that can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.engine.errors import EngineError

MAX_PROCESSES = 2  # so that a process busy with a bad request blocks nobody
PATIENCE_S = 30.0  # for a process that gets no CPU time; the kernel ends a running one much sooner
TRIES = 2  # the last one in a new process: what killed an idle one may have killed all

_OWN_SIGNALS = (signal.SIGSEGV, signal.SIGABRT)  # a stack overflow, or memory refused outside Python
_SIZE_BYTES = 8
_CHILD = Path(__file__).with_name("child.py")
# Variables that Python may need. The rest of the environment may have secrets.
_VARIABLES = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Resources that one request may use."""

    cpu_s: float
    max_bytes: int  # of address space
    max_bytes_per_byte: int  # added per byte of the request
    max_idle_bytes: int  # a process that has grown beyond this ends; the next one starts small


class RequestEnded(Exception):
    """A request ended its process, or was ended with it. The message says how."""

    def __init__(self, message: str, *, is_by_request: bool) -> None:
        """Stores the reason.

        `is_by_request` says that the request used more than its bounds, and would again. Otherwise the machine may have
        been busy, or out of memory.
        """
        super().__init__(message)
        self.is_by_request = is_by_request


class Sandbox:
    """Answers requests in processes of its own, started on first use. Any thread may use it.

    The processes end with this object or with this process, and each by itself when a request takes too long.
    """

    def __init__(self, program: Path, setup: object, bounds: Bounds) -> None:
        """Prepares a sandbox for `program`, as `child.py` describes it; its `start` takes `setup`."""
        self._program = program
        self._setup = _encoded(setup)
        self._bounds = bounds
        self._turns = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: list[_Process] = []
        weakref.finalize(self, _end_all, self._idle)

    def start(self) -> None:
        """Starts a process ahead of time, so that the first request need not wait for it."""
        if not self._idle:
            self._idle.append(self._new())

    def ask(self, request: object) -> dict[str, Any]:
        """Returns the answer to a request. Blocks while the program runs, which the bounds keep short.

        Raises:
            RequestEnded: the request takes too much time or memory.
            EngineError: no process can run here.
        """
        frame = _encoded(request)
        with self._turns:
            return self._ask(frame)

    def _ask(self, request: bytes) -> dict[str, Any]:
        for tries_left in reversed(range(TRIES)):
            process = (self._idle_one() if tries_left else None) or self._new()
            try:
                answer = process.ask(request)
            except _Gone as gone:
                if not tries_left or gone.is_final:
                    raise gone.error(self._bounds) from None
                continue
            if answer["is_last"]:
                process.end()
            else:
                self._idle.append(process)
            return answer
        raise AssertionError("the last try returns or raises")

    def _idle_one(self) -> _Process | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _new(self) -> _Process:
        return _Process(self._program, self._setup, self._bounds)


class _Gone(Exception):
    """The process ended with `status`, as in `Popen.returncode`; None: it did not answer and was killed."""

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status

    @property
    def is_final(self) -> bool:
        """Whether not to retry: the request used up its time, or no answer came in time."""
        return self.status in (None, -signal.SIGPROF)

    def error(self, bounds: Bounds) -> Exception:
        if self.status == -signal.SIGPROF:
            return RequestEnded(f"it takes more than {bounds.cpu_s:g} s", is_by_request=True)
        if self.status is None:
            return RequestEnded(f"no answer within {PATIENCE_S:g} s", is_by_request=False)
        if self.status < 0:
            is_by_request = -self.status in _OWN_SIGNALS
            return RequestEnded(f"its process died of signal {-self.status}", is_by_request=is_by_request)
        return EngineError(f"the process of a sandbox ended with status {self.status}")


class _Process:
    """One running process. Only one thread at a time may use it."""

    def __init__(self, program: Path, setup: bytes, bounds: Bounds) -> None:
        self._unsent = _framed(setup)
        self._socket, theirs = socket.socketpair()
        try:
            self._process = _started(program, bounds, theirs)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def ask(self, request: bytes) -> dict[str, Any]:
        """Returns the answer. Raises _Gone if there is none. If it raises anything, the process has ended."""
        with contextlib.ExitStack() as unless_answered:
            unless_answered.callback(self.end)
            try:
                answer = self._ask(request)
            except TimeoutError:
                raise _Gone(None) from None
            except (OSError, EOFError):
                raise _Gone(self._status()) from None
            unless_answered.pop_all()
            return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _status(self) -> int | None:
        """Returns the exit status of a process that has closed its end of the socket, which it does last."""
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return None

    def _ask(self, request: bytes) -> dict[str, Any]:
        frames, self._unsent = self._unsent + _framed(request), b""
        give_up_s = time.monotonic() + PATIENCE_S
        self._socket.settimeout(PATIENCE_S)
        self._socket.sendall(frames)
        size = int.from_bytes(self._read(_SIZE_BYTES, give_up_s))
        answer: dict[str, Any] = json.loads(self._read(size, give_up_s))
        return answer

    def _read(self, num_bytes: int, give_up_s: float) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            self._socket.settimeout(max(give_up_s - time.monotonic(), 0.001))
            part = self._socket.recv(min(num_bytes - len(data), 2**20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


def _started(program: Path, bounds: Bounds, channel: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603  our own program
        [sys.executable, "-P", str(_CHILD), str(program), json.dumps(asdict(bounds))],
        stdin=channel.fileno(),
        stdout=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name in _VARIABLES or name.startswith("PYTHON")},
        start_new_session=True,  # Ctrl-C is for the worker, which then finishes what it has
    )


def _end_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()


def _encoded(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(_SIZE_BYTES) + data

"""A model's chat template, rendered where it can be ended."""

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.engine.errors import EngineError, InvalidRequest
from penstock.engine.text.template_process import CPU_S

MAX_PROCESSES = 2  # so that one that is busy with a bad request keeps nobody waiting
PATIENCE_S = 30.0  # for a process that is not even running; one that runs is ended by the kernel, much sooner
TRIES = 2  # the last one in a new process: what killed an idle one may have killed all

_SIZE_BYTES = 8
_PROGRAM = Path(__file__).with_name("template_process.py")
# What Python may need. The rest of the environment has secrets.
_VARIABLES = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "VIRTUAL_ENV")


class ChatTemplate:
    """Renders one template in processes of its own, started when they are first needed. Any thread may use it.

    They end with this object, with this process, and each by itself when a rendering takes too long.
    """

    def __init__(self, source: str) -> None:
        self._source = _encoded(source)
        self._turns = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: list[_Process] = []
        weakref.finalize(self, _end_all, self._idle)

    def render(self, variables: Mapping[str, Any], *, now_s: float | None = None) -> str:
        """Blocks for as long as the template takes, and that is not long.

        Args:
            variables: that the template knows.
            now_s: what it takes for the present, in Unix time; None: the present.

        Raises:
            InvalidRequest: the template refuses the variables, fails, or takes too much time, text or memory.
            EngineError: no process for it runs here.
        """
        request = _encoded({"variables": variables, "now_s": time.time() if now_s is None else now_s})
        with self._turns:
            answer = self._ask(request)
        if "refused" in answer:
            raise InvalidRequest(f"the model's chat template refuses these messages: {answer['refused']}")
        if "failed" in answer:
            raise InvalidRequest(f"the model's chat template failed: {answer['failed']}")
        return str(answer["text"])

    def _ask(self, request: bytes) -> dict[str, Any]:
        for tries_left in reversed(range(TRIES)):
            process = (self._idle_one() if tries_left else None) or _Process(self._source)
            try:
                answer = process.ask(request)
            except _Gone as gone:
                if not tries_left or gone.is_by_template:
                    raise gone.error() from None
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


class _Gone(Exception):
    """The process ended, with `status` as in `Popen.returncode`; None: it did not answer and was killed."""

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status

    @property
    def is_by_template(self) -> bool:
        return self.status in (None, -signal.SIGPROF)

    def error(self) -> EngineError:
        if self.status == -signal.SIGPROF:
            return InvalidRequest(f"the model's chat template failed: it takes more than {CPU_S:g} s")
        if self.status is None:
            return InvalidRequest(f"the model's chat template failed: no answer within {PATIENCE_S:g} s")
        if self.status < 0:
            return InvalidRequest(f"the model's chat template failed: its process died of signal {-self.status}")
        return EngineError(f"the process that renders chat templates ended with status {self.status}")


class _Process:
    """One that is running. One thread at a time uses it."""

    def __init__(self, source: bytes) -> None:
        self._unsent = _framed(source)
        self._socket, theirs = socket.socketpair()
        try:
            self._process = _started(theirs)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def ask(self, request: bytes) -> dict[str, Any]:
        """Raises _Gone if there is no answer. Whatever it raises, the process has ended then."""
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
        """Of a process that has closed its end, which is the last that it does."""
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


def _started(channel: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603  our own program
        [sys.executable, "-P", str(_PROGRAM)],
        stdin=channel.fileno(),
        stdout=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name in _VARIABLES or name.startswith("PYTHON")},
        start_new_session=True,  # Ctrl-C is for the worker, which goes on with what it has then
    )


def _end_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()


def _encoded(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(_SIZE_BYTES) + data

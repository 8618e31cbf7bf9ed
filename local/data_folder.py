"""The folder where `penstock serve` keeps its queue. It has one owner at a time, whose addresses others can read."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_LOCK, _OWNER, _DATA = "lock", "owner.json", "redis"


class FolderTaken(Exception):
    """Another process serves from the folder. The message names both."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that serves from a folder, or did so last."""

    pid: int
    redis_url: str
    url: str = ""  # of its gateway, once it listens


class DataFolder:
    """Belongs to this process between `__enter__` and `__exit__`. The system releases it if the process is killed.

    Raises (on entering):
        FolderTaken: another process serves from it.
        OSError: it cannot be made or written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def data(self) -> Path:
        """Where the server keeps its files."""
        return self.path / _DATA

    def __enter__(self) -> Self:
        self.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            owner = self._read()
            there = "another process" if owner is None else f"process {owner.pid} {_places(owner)}"
            raise FolderTaken(
                f"{there} serves from {self.path} already; stop it, or give another folder with --data-dir"
            ) from None
        self._lock = lock
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def owner(self) -> Owner | None:
        """Returns the process that serves from the folder now."""
        try:
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._read()
        finally:
            os.close(lock)
        return None

    def note(self, owner: Owner) -> None:
        """Tells others where this process can be reached."""
        fresh = self.path / f"{_OWNER}.new"
        fresh.write_text(json.dumps(asdict(owner)))
        fresh.replace(self.path / _OWNER)

    def last_port(self) -> int | None:
        """Returns the port that the server had last if it is free: clients that know it find it again."""
        last = self._read()
        try:
            port = None if last is None else urlsplit(last.redis_url).port
            if port is not None:
                socket.create_server(("127.0.0.1", port)).close()
        except (OSError, ValueError):
            return None
        return port

    def _read(self) -> Owner | None:
        try:
            return Owner(**json.loads((self.path / _OWNER).read_text()))
        except (OSError, ValueError, TypeError):  # none has left word yet
            return None


def default_data_dir() -> Path:
    """Returns the default folder.

    Raises:
        RuntimeError: this user has no home folder.
    """
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "penstock" / "serve"


def _places(owner: Owner) -> str:
    return f"({owner.url or owner.redis_url})"

"""Files that outlive a process: written whole or not at all, and ignored once damaged.

A digest tells whether a file is what was written. A file that a full disk cut short, a crash left empty or a bad disk
changed counts as missing. This protects against accidents, not against anyone with write access to the folder. If
something other than a file (a folder, a pipe) stands in a file's place, it is never opened; it is moved aside.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_log = logging.getLogger(__name__)
_unkept: set[Path] = set()  # folders known not to accept writes

_DIGEST_BYTES = hashlib.sha256().digest_size
_DIGEST_SUFFIX = ".sha256"


def keep(path: Path, data: bytes) -> None:
    """Writes a file that `recall` reads. Raises OSError if the folder cannot be written to."""
    _replace(path, hashlib.sha256(data).digest() + data)


def keep_if_possible(path: Path, data: bytes) -> None:
    """Writes a file that the next start can do without. Logs once why a folder cannot be written to."""
    try:
        keep(path, data)
    except OSError as error:
        say_unkept(path.parent, error)


def say_unkept(folder: Path, why: Exception, *, is_told: bool = False) -> None:
    """Logs once why a folder cannot be written to, unless that is known of it or of a folder above it.

    Args:
        folder: where the file was to be written.
        why: the error.
        is_told: whether the caller reports it in another way.
    """
    if _unkept.isdisjoint((folder, *folder.parents)):
        _unkept.add(folder)
        if not is_told:
            _log.warning("compilations_not_kept: %s", why)


def recall(path: Path) -> bytes | None:
    """Returns what was kept, or None if the file is missing, damaged or unreadable."""
    try:
        kept = _read(path)
    except OSError:
        return None
    digest, data = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
    return data if hashlib.sha256(data).digest() == digest else None


def mark_used(path: Path) -> None:
    """Makes a file the youngest of its folder, which `forget_oldest` reads. A read-only folder stays as it is."""
    with suppress(OSError):
        os.utime(path)


def files_in(folder: Path) -> list[Path]:
    """Returns the paths in a folder; none if it cannot be read."""
    with suppress(OSError):
        return list(folder.iterdir())
    return []


def forget_oldest(paths: Iterable[Path], max_bytes: int) -> None:
    """Removes the files that were written or used longest ago, so that the others fit `max_bytes`.

    Other processes may do so at the same time.
    """
    files = []
    for path in paths:
        with suppress(OSError):  # another process removed or replaced it
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                files.append((found.st_mtime_ns, found.st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > max_bytes:
            with suppress(OSError):
                path.unlink()


def install(source: Path, path: Path) -> None:
    """Moves a file to `path`, on the same file system, and writes its digest next to it.

    The replacement is atomic: a process that has mapped the old file continues with it.

    Raises:
        OSError: the folder cannot be written to.
    """
    with source.open("rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
        os.fsync(file.fileno())
    _move(source, path)
    _replace(_digest_file(path), f"{digest}\n".encode())


def is_whole(path: Path) -> bool:
    """Whether `path` is the file that `install` put there."""
    try:
        return _read(_digest_file(path)).strip() == hashlib.sha256(_read(path)).hexdigest().encode()
    except OSError:
        return False


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Locks the folder against other processes that make the same file, where the file system has locks.

    Raises:
        OSError: the folder does not exist and cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _digest_file(path: Path) -> Path:
    return path.with_name(path.name + _DIGEST_SUFFIX)


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        scratch.write_bytes(data)  # not synced: after a crash the digest does not match
        _move(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _move(source: Path, path: Path) -> None:
    """Replaces a file atomically. A folder in its place is kept under another name."""
    try:
        source.replace(path)
    except IsADirectoryError:
        path.rename(path.with_name(f"{path.name}.aside-{secrets.token_hex(4)}"))
        source.replace(path)


def _read(path: Path) -> bytes:
    """Reads a regular file. Raises OSError if it is missing or not a regular file."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileNotFoundError(f"{path} is not a file")
        return file.read()


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # otherwise opening a pipe blocks

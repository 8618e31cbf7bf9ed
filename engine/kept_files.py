"""Files that outlive a process: written whole or not at all, and never trusted after they were harmed.

A digest tells whether a file is what was written: one that a full disk cut short, a crash left empty or a disk changed
is as if it were not there. It protects from accidents, not from somebody who may write to the folder. What is no file
(a folder, a pipe) in a file's place is never opened; it is moved aside for the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_log = logging.getLogger(__name__)
_unkept: set[Path] = set()  # folders that are known to take nothing

_DIGEST_BYTES = hashlib.sha256().digest_size
_DIGEST_SUFFIX = ".sha256"


def keep(path: Path, data: bytes) -> None:
    """Writes a file that `recall` reads. Raises OSError: the folder can't be written to."""
    _replace(path, hashlib.sha256(data).digest() + data)


def keep_if_possible(path: Path, data: bytes) -> None:
    """`keep` of what the next start can do without. Why a folder takes nothing is logged once."""
    try:
        keep(path, data)
    except OSError as error:
        say_unkept(path.parent, error)


def say_unkept(folder: Path, why: Exception, *, is_told: bool = False) -> None:
    """Logs once why a folder takes nothing, unless that is known of it, or of one that it is in.

    Args:
        folder: what was to be kept in.
        why: the error.
        is_told: that somebody else says it.
    """
    if _unkept.isdisjoint((folder, *folder.parents)):
        _unkept.add(folder)
        if not is_told:
            _log.warning("compilations_not_kept: %s", why)


def recall(path: Path) -> bytes | None:
    """What was kept; None if nothing was, or it was harmed, or it can't be read."""
    try:
        kept = _read(path)
    except OSError:
        return None
    digest, data = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
    return data if hashlib.sha256(data).digest() == digest else None


def install(source: Path, path: Path) -> None:
    """Moves a file of the same folder's file system to `path`, with its digest beside it.

    It takes the place of the one that is there in one step: who has mapped the old one goes on with it.

    Raises:
        OSError: the folder can't be written to.
    """
    with source.open("rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
        os.fsync(file.fileno())
    _move(source, path)
    _replace(_digest_file(path), f"{digest}\n".encode())


def is_whole(path: Path) -> bool:
    """Whether `path` is what `install` put there."""
    try:
        return _read(_digest_file(path)).strip() == hashlib.sha256(_read(path)).hexdigest().encode()
    except OSError:
        return False


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Other processes that want to make the same file there wait meanwhile, where the file system has locks.

    Raises:
        OSError: the folder is not there, and can't be made.
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
        scratch.write_bytes(data)  # not synced: what a crash leaves of it has another digest
        _move(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _move(source: Path, path: Path) -> None:
    """Takes the place of a file in one step. A folder that stands there is kept under another name."""
    try:
        source.replace(path)
    except IsADirectoryError:
        path.rename(path.with_name(f"{path.name}.aside-{secrets.token_hex(4)}"))
        source.replace(path)


def _read(path: Path) -> bytes:
    """Raises OSError: it is not there, or no file."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileNotFoundError(f"{path} is no file")
        return file.read()


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # else a pipe is waited for

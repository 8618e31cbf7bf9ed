"""The folder with models that were fetched by this program. The hub's client keeps its own."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.errors import CheckpointError

ORIGIN_FILE = "origin"
"""Names where the folder's model came from. It is written last: without it, nothing in the folder counts."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache: its name as it was asked for, its file or folder, and the size of it."""

    name: str
    path: Path
    num_bytes: int


def models_dir() -> Path:
    """Returns the cache's folder, which need not be there yet."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111  a home may be missing
    return Path(root) / "penstock" / "models"


def folder_of(name: str) -> Path:
    """Returns the folder of a model, by the name that it is asked for."""
    plain = "".join(char if char.isalnum() or char in "-._" else "-" for char in name)[-60:]
    return models_dir() / f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def cached(name: str) -> Path | None:
    """Returns a model's file or folder if it was fetched whole."""
    found = _read(folder_of(name))
    return None if found is None else found.path


def cached_models() -> list[CachedModel]:
    """Returns the models that are there whole."""
    folder = models_dir()
    models = map(_read, sorted(folder.iterdir())) if folder.is_dir() else ()
    return [each for each in models if each is not None]


def clear(name: str) -> int:
    """Deletes a model and what was fetched of it. Returns how many bytes that were; 0: it was not there.

    Raises:
        CheckpointError: it can't be deleted.
    """
    folder = folder_of(name)
    if not folder.is_dir():
        return 0
    try:
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        shutil.rmtree(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} can't be deleted: {error}") from error
    return num_bytes


def fetched_once(name: str, fetch: Callable[[Path], Path]) -> Path:
    """Returns a model's file or folder. If it is not there whole, `fetch` puts it into the model's folder.

    Raises:
        CheckpointError: the model can't be kept.
        Exception: what `fetch` raises.
    """
    path = cached(name)
    if path is not None:
        return path
    with being_fetched(name) as folder:
        path = cached(name)  # another process was quicker
        return keep(folder, name, fetch(folder)) if path is None else path


@contextmanager
def being_fetched(name: str) -> Iterator[Path]:
    """Yields a model's folder, for one process at a time.

    Raises:
        CheckpointError: it can't be made.
    """
    folder = folder_of(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unkept(folder, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(lock)


def keep(folder: Path, name: str, file: Path) -> Path:
    """Notes that a folder's model is whole: its `file`, perhaps a folder, is there under its own name. Returns it."""
    beside = folder / f"{ORIGIN_FILE}.new"
    try:
        beside.write_text(f"{name}\n{file.name}\n{_size_of(file)}\n")
        beside.replace(folder / ORIGIN_FILE)
    except OSError as error:
        raise _unkept(folder, error) from error
    return file


def _unkept(folder: Path, why: OSError) -> CheckpointError:
    return CheckpointError(f"models can't be kept in {folder}: {why}; set XDG_CACHE_HOME")


def _size_of(path: Path) -> int:
    if path.is_dir():
        return sum(each.stat().st_size for each in path.iterdir())
    return path.stat().st_size


def _read(folder: Path) -> CachedModel | None:
    """Returns a folder's model, if it is whole: what was cut short has another size."""
    try:
        name, file, size = (folder / ORIGIN_FILE).read_text().splitlines()
        path = folder / file
        is_whole = _size_of(path) == int(size)
    except (OSError, ValueError):
        return None
    return CachedModel(name, path, int(size)) if is_whole else None

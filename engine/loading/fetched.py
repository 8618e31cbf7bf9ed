"""Finds damaged files of models in the hub client's cache.

Each file there is a link to another whose name is its digest. So damage by a full disk, a crash or a person is found
without a network.

Every file is read once after it was fetched, and again if it has changed (its size, time or place on the disk).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from penstock.engine import kept_files
from penstock.engine.processors import num_processors

_MEMORY = ".penstock-checked"  # beside the client's own folders
_SHA256, _GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


def damaged_files(snapshot: Path) -> list[str]:
    """Returns the names of a snapshot's files that differ from what was fetched, or are gone.

    Args:
        snapshot: `.../snapshots/REVISION`, as `huggingface_hub.snapshot_download` returns it. Files that are not links,
            as on file systems without them, have no digest and count as intact.
    """
    memory = snapshot.parent.parent / _MEMORY
    known = _recalled(memory)
    links = [path for path in sorted(snapshot.rglob("*")) if path.is_symlink()]
    marks = {path: _mark(path) for path in links}
    new = [path for path in links if marks[path] is None or marks[path] not in known]
    with ThreadPoolExecutor(num_processors()) as threads:
        whole = dict(zip(new, threads.map(_is_whole, new), strict=True))
    found = {mark for path, mark in marks.items() if mark is not None and whole.get(path, True)}
    if found - known:
        with suppress(OSError):  # the next start reads them again
            kept_files.keep(memory, json.dumps(sorted(found | known)).encode())
    return [str(path.relative_to(snapshot)) for path in new if not whole[path]]


def _mark(path: Path) -> str | None:
    """Returns a mark that changes when the file is written or replaced; None: it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return f"{path.readlink()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"


def _is_whole(path: Path) -> bool:
    name = path.readlink().name
    try:
        if not path.is_file():
            return False
        if _SHA256.fullmatch(name):
            return _digest(path, hashlib.sha256()) == name
        if _GIT.fullmatch(name):
            head = f"blob {path.stat().st_size}\0".encode()  # git's digest; some mirrors use that of the file alone
            return name in (_digest(path, hashlib.sha1(start, usedforsecurity=False)) for start in (head, b""))
    except OSError:
        return False
    return True  # from a client with other file names


def _digest(path: Path, digest: hashlib._Hash) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest()


def _recalled(memory: Path) -> set[str]:
    try:
        kept: Iterable[object] = json.loads(kept_files.recall(memory) or b"[]")
        return {mark for mark in kept if isinstance(mark, str)}
    except (ValueError, TypeError):
        return set()

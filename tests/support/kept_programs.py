"""What XLA compiled in earlier runs of the tests, kept in the checkout until `make clean`.

A program's name is jax's own key: a digest of what is compiled, the options, and the versions of jax and XLA. The
planner keeps what it read from a program under such a digest too, which includes its own code. A run reads these files
through links in a folder of its own. When it ends, it adds those that it wrote itself. Nothing else that a worker keeps
beside its programs, such as measured step times, gets from one run into the next.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.engine import kept_files
from penstock.engine.processors import cpu_facts
from tests.support.packages import ROOT

KEPT = ROOT / ".cache" / "programs"
MAX_BYTES = 2**28  # a whole run takes about 90 MB
PATTERNS = ("*-program", "plans/*.json")


@contextmanager
def kept_between_runs(directory: Path, kept: Path | None = None, max_bytes: int = MAX_BYTES) -> Iterator[None]:
    """Shows files of earlier runs in `directory`, and keeps at the end those that are new there.

    Processes of several runs may do so at once: a file appears whole or not at all. The run that finds a damaged one
    compiles anew, and replaces it.
    """
    kept = kept or KEPT / _processor()
    for name in _names(kept):
        link = directory / name
        link.parent.mkdir(exist_ok=True)
        with suppress(FileExistsError):
            link.symlink_to(kept / name)
    try:
        yield
    finally:
        for name in _names(directory):
            if not (directory / name).is_symlink():
                _keep(directory / name, kept / name)
        kept_files.forget_oldest([kept / name for name in _names(kept)], max_bytes)


def _processor() -> str:
    """Names this kind of processor: programs use its instructions, and a checkout may be on a shared disk."""
    facts = sorted(set(cpu_facts("model name", "flags", "Features")))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _names(folder: Path) -> list[Path]:
    return [path.relative_to(folder) for pattern in PATTERNS for path in folder.glob(pattern)]


def _keep(file: Path, path: Path) -> None:
    with suppress(FileNotFoundError):  # another process of this run has just replaced it
        if path.exists() and path.stat().st_mtime_ns == file.stat().st_mtime_ns:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
        shutil.copy2(file, scratch)
        scratch.replace(path)

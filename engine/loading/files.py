"""Reads files of a checkpoint's folder. They come from strangers: none may block, fill the memory or break
the parser.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.engine.errors import CheckpointError

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
MAX_BYTES = 2**27  # of a text file; the largest in use, indices and tokenizers, have about 40 MB
TEXT_SUFFIXES = {".json", ".jinja", ".txt", ".model"}
TEMPLATE_DIR = "additional_chat_templates"
SAMPLES, SAMPLE_BYTES = 32, 4096


def expanded(path: str | Path) -> Path:
    """Expands `~` to the home folder, or leaves it if there is none, for which `Path.expanduser` raises."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
        CheckpointError: the file is missing, unreadable, too large, or holds something else.
    """
    try:
        fields = json.loads(_read(path))
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path.name} in {path.parent}") from None
    except RecursionError:
        raise CheckpointError(f"{path} is not readable as JSON: it is nested too deep") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} holds a {type(fields).__name__}, not a JSON object")
    return fields


def check_files(directory: Path) -> None:
    """Calls `check_file` on all files of a checkpoint's folder that others read.

    Raises:
        CheckpointError: the message names the file.
    """
    for folder in (directory, directory / TEMPLATE_DIR):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.exists() and not path.is_dir():
                check_file(path)


def check_file(path: Path) -> None:
    """Checks a file before other code opens it: a pipe or a device would block it, and it reads a text file whole.

    Raises:
        CheckpointError: it is not a regular file, or a text file that is too large.
    """
    try:
        _check(path, path.stat())
    except OSError as error:
        raise CheckpointError(f"{path} is not readable: {error}") from error


def samples(path: Path, first: int = 0) -> Iterator[bytes]:
    """Yields a few bytes from the `first` one on, and from places spread over all that follow."""
    size = path.stat().st_size - first
    with path.open("rb") as file:
        for place in range(SAMPLES):
            file.seek(first + place * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)


def _read(path: Path) -> str:
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        _check(path, status)
        return file.read(status.st_size).decode()  # a larger size would allocate that much


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # otherwise opening a pipe waits for a writer


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is {_kind(status.st_mode)}, not a regular file")
    if path.suffix in TEXT_SUFFIXES and status.st_size > MAX_BYTES:
        raise CheckpointError(f"{path} has {status.st_size} bytes, more than the {MAX_BYTES} that are read")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")

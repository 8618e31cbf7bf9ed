"""Takes from this process, while a block lasts, what a small container, a sandbox or another system lacks."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

_OF_THE_KERNEL = ("/proc", "/sys", "/dev/shm")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = ("os.mkdir", "os.rename", "os.link", "os.symlink", "tempfile.mkdtemp", "tempfile.mkstemp")
_CALLS = ((os, "sched_getaffinity"), (os, "getloadavg"), (resource, "setrlimit"), (socket, "gethostname"))

_refused: Counter[str] | None = None
_is_heard = False


@contextmanager
def no_files_and_no_favours() -> Iterator[Counter[str]]:
    """Takes files and system calls away from this process; counts refusals by name.

    Nothing is known of the process and its machine, and no folder can be written to: no home, no temporary files, no
    shared memory. System calls for favours are refused.
    """
    global _is_heard, _refused  # noqa: PLW0603 - an audit hook stays for good
    if not _is_heard:
        sys.addaudithook(_hear)
        _is_heard = True
    refused: Counter[str] = Counter()
    _refused = refused
    try:
        with ExitStack() as patched:
            for owner, name in _CALLS:
                if hasattr(owner, name):
                    patched.enter_context(mock.patch.object(owner, name, _refuser(name)))
            yield refused
    finally:
        _refused = None


def _refuser(name: str) -> object:
    def refuse(*_: object) -> None:
        _refuse(name)

    return refuse


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if _refused is None:
        return
    if event == "open":
        path, _, flags = arguments
        name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if name.startswith(_OF_THE_KERNEL) or (name != os.devnull and name and int(str(flags)) & _WRITES):
            _refuse(name)
    elif event in _CHANGES:
        _refuse(str(arguments[0]))


def _refuse(what: str) -> None:
    if _refused is not None:
        _refused[what] += 1
    raise PermissionError(1, "Operation not permitted", what)

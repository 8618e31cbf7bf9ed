"""The process of a sandbox; `sandbox.py` starts it by this file's path and that of a program.

Nothing inside a process can reliably stop untrusted code. So the kernel enforces the limits: it ends the process when a
request has used up its time, and refuses memory beyond a bound.

This file is a script: it imports nothing of Penstock, and its imports load within a twentieth of a second. The same
holds for the programs. A program's `start` takes the sandbox's setup and returns a function. That function answers one
request, given with its size in bytes, by `{"text": ...}`, `{"refused": ...}` or `{"failed": ...}`.

Frames are a length in 8 bytes and JSON, both ways over the socket that is the standard input. The first holds the
argument of `start`, each further one a request. The end of the input ends the process.
"""

from __future__ import annotations

import contextlib
import json
import resource
import runpy
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

MAX_MESSAGE_CHARS = 500

_Answer = Callable[[Any, int], Mapping[str, str]]


def main() -> None:
    for number in (signal.SIGPIPE, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the mask is inherited from the starting thread
    with contextlib.suppress(OSError, ValueError):  # without the permission, core dumps stay as the system sets them
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123  an import less
        file.write("1000")  # if memory runs out, this process is killed, not the worker
    program, bounds = sys.argv[1], json.loads(sys.argv[2])
    with open(0, "rb") as requests, open(0, "wb", closefd=False) as answers:
        setup = _frame(requests)
        if not setup:  # the starting process has ended
            return
        answer = runpy.run_path(program)["start"](json.loads(setup))
        while request := _frame(requests):
            outcome = _answered(answer, request, bounds)
            answers.write(len(outcome).to_bytes(8) + outcome)
            answers.flush()


def _answered(answer: _Answer, request: bytes, bounds: Mapping[str, Any]) -> bytes:
    max_bytes = bounds["max_bytes"] + bounds["max_bytes_per_byte"] * len(request)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)  # the worker's own limit, which stays
    if hard != resource.RLIM_INFINITY:
        max_bytes = min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, hard))
    signal.setitimer(signal.ITIMER_PROF, bounds["cpu_s"])  # then SIGPROF, which ends the process
    try:
        return _encoded(answer(json.loads(request), len(request)), bounds["max_idle_bytes"])
    except MemoryError:
        pass  # the exception releases what holds the memory
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return _encoded({"failed": f"it needs more than {max_bytes >> 20} MiB of memory"}, bounds["max_idle_bytes"])


def _encoded(outcome: Mapping[str, str], max_idle_bytes: int) -> bytes:
    shortened = {kind: text if kind == "text" else text[:MAX_MESSAGE_CHARS] for kind, text in outcome.items()}
    answer = {**shortened, "is_last": _held_bytes() > max_idle_bytes}
    return json.dumps(answer, ensure_ascii=False).encode(errors="surrogatepass")


def _held_bytes() -> int:
    """Returns the address space in bytes. `ru_maxrss` would start at the value of the process that started this one."""
    try:
        with open("/proc/self/statm") as file:  # noqa: PTH123  an import less
            return int(file.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):  # not Linux, or no /proc
        return 0


def _frame(stream: BinaryIO) -> bytes:
    """Reads a whole frame; returns nothing at the end of the input."""
    size = int.from_bytes(stream.read(8))
    data = stream.read(size)
    return data if len(data) == size else b""


if __name__ == "__main__":
    main()

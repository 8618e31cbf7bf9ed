"""How many processors this process may keep busy: those it may run on, and a container's quota of their time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_XLA_THREADS = "PJRT_NPROC"  # how many threads XLA computes with on a CPU; it knows of no quota


def num_processors() -> int:
    """At least 1. A quota of one and a half processors is two: threads wait less than they would by turns."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(quota) for quota in _quotas())]))


def bound_xla() -> None:
    """Has XLA use no more threads than a quota allows, unless the environment says how many.

    To be called before JAX looks for its devices.
    """
    if any(True for _ in _quotas()):
        os.environ.setdefault(_XLA_THREADS, str(num_processors()))


def _quotas() -> Iterator[float]:
    """Processors by each quota that holds for this process: its group's, and those of the groups above it."""
    for line in _read(_OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _ROOT if not controllers else _ROOT / "cpu"
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == root.parent:
                break
            quota = _quota_v2(folder) if not controllers else _quota_v1(folder)
            if quota is not None:
                yield quota


def _quota_v2(folder: Path) -> float | None:
    """Of `cpu.max`: microseconds, or `max`, in a period of so many."""
    words = _read(folder / "cpu.max").split()
    return _ratio(*words) if len(words) == 2 else None


def _quota_v1(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    with suppress(ValueError, ZeroDivisionError):
        processors = int(quota) / int(period)
        return processors if processors > 0 else None
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""

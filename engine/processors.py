"""The number of processors this process may keep busy, and what the kernel says about them.

It follows from the CPU affinity and a container's CPU quota. If the kernel says nothing, as in some sandboxes and on
other systems, that is not an error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
_VECTORS = ("sse", "ssse", "avx", "fma", "f16c", "amx", "asimd", "sve", "sme", "bf16", "i8mm", "fphp")
_XLA_THREADS = "PJRT_NPROC"  # number of threads of XLA on CPU; XLA ignores quotas


def num_processors() -> int:
    """Returns at least 1. A quota of 1.5 processors counts as two: threads wait less than if they took turns."""
    return max(1, min([num_allowed(), *(math.ceil(quota) for quota in _quotas())]))


def cpu_facts(*fields: str) -> list[str]:
    """Returns the lines of /proc/cpuinfo that begin with one of `fields`, per processor; none if it can't be read."""
    return [line for line in _read(_CPUINFO).splitlines() if line.startswith(fields)]


def vector_features() -> list[str]:
    """Returns the names of the vector instructions that a processor has, sorted."""
    flags = {flag for line in cpu_facts("flags", "Features") for flag in line.partition(":")[2].split()}
    return sorted(flag for flag in flags if flag.startswith(_VECTORS))


def num_allowed() -> int:
    """Returns the number of processors in the CPU affinity, whatever the quota; all if the system does not say."""
    with suppress(AttributeError, OSError):  # no Linux; a sandbox that refuses the call
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def bound_xla() -> None:
    """Limits XLA's threads to the quota, unless the environment sets a number.

    Call it before JAX looks for its devices.
    """
    if any(True for _ in _quotas()):
        os.environ.setdefault(_XLA_THREADS, str(num_processors()))


def _quotas() -> Iterator[float]:
    """Yields the processors of each quota that applies to this process: its own group's and its ancestors'."""
    for line in _read(_OWN).splitlines():
        _, _, rest = line.partition(":")
        controllers, has_path, path = rest.partition(":")
        if not has_path:
            continue
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
    """Reads `cpu.max`: microseconds, or `max`, and the period in microseconds."""
    words = _read(folder / "cpu.max").split()
    return _ratio(*words) if len(words) == 2 else None


def _quota_v1(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    with suppress(ValueError, ArithmeticError):
        processors = int(quota) / int(period)
        return processors if processors > 0 else None
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):  # ValueError: it is not a path at all
        return ""

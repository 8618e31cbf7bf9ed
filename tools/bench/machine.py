"""Describes a measurement's machine: figures need one."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.engine.processors import cpu_facts, num_allowed, vector_features
from penstock.protocol.version import __version__

PACKAGES = ("jax", "jaxlib", "numpy", "redis", "hiredis", "transformers", "torch")


def describe_machine() -> dict[str, Any]:
    """Returns processor, cores, memory, GPUs, versions, and the load before: one JSON object."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "processor": _processor(),
        "flags": vector_features(),
        "cores": num_allowed(),
        "memory_gib": _memory_gib(),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": _load(),
        "versions": {"python": platform.python_version(), "penstock": __version__, **_versions()},
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in cpu_facts("model name")]
    return names[0] if names else platform.processor()


def _gpus() -> list[str]:
    """Returns names from NVIDIA's driver; none without it."""
    try:
        infos = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        lines = [line for info in infos for line in info.read_text().splitlines()]
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def _load() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None

"""Engines on eight host devices, in a process of their own."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from penstock.engine.execution.compilation import keep_compilations
from tests.support.patience import WAIT_S

Runs = dict[str, dict[str, dict[str, Any]]]
"""Results of tensor_parallel_process.py, by model and layout."""


def run_on_devices(model: Path, layouts: str) -> dict[str, dict[str, Any]]:
    """Runs one model on each of the comma-separated layouts; returns the results by layout."""
    return run_models({"model": (model, layouts)})["model"]


def run_models(models: Mapping[str, tuple[Path, str]], *, may_be_refused: bool = False) -> Runs:
    """Runs several models in one process: starting a process takes longer than running a model."""
    plan = json.dumps({name: [str(directory), layouts] for name, (directory, layouts) in models.items()})
    found: Runs = said_by("tests.engine.sharding.tensor_parallel_process", plan, wait_s=WAIT_S * len(models))
    refused = [run["refused"] for runs in found.values() for run in runs.values() if "refused" in run]
    assert may_be_refused or not refused, refused
    return found


def said_by(module: str, *arguments: str, wait_s: float = WAIT_S) -> Any:
    """Runs a module, which calls `keep_as_told`, with eight host devices; returns the JSON that it prints."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": jax.config.values["jax_compilation_cache_dir"],
    }
    command = [sys.executable, "-m", module, *arguments]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=wait_s, check=False)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    return json.loads(outcome.stdout)


def keep_as_told() -> None:
    """Keeps what this process compiles where the process keeps it that started it."""
    keep_compilations(Path(jax.config.values["jax_compilation_cache_dir"]))


def once(file: Path, compute: Callable[[], Runs]) -> Runs:
    """Returns what `compute` gives, kept in `file`: of the test processes that share it, all wait for the first."""
    with file.open("a+") as shared:
        fcntl.flock(shared, fcntl.LOCK_EX)
        shared.seek(0)
        kept = shared.read()
        found: Runs = json.loads(kept) if kept else compute()
        if not kept:
            json.dump(found, shared)
    return found

"""Engines on eight host devices, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from patience import WAIT_S


def run_on_devices(model: Path, layouts: str) -> dict[str, dict[str, Any]]:
    """What tensor_parallel_process.py says of `model` on each of the comma-separated layouts, by layout."""
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{here.parent.parent}{os.pathsep}{here}",
    }
    command = [sys.executable, str(here / "tensor_parallel_process.py"), str(model), *layouts.split(",")]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(outcome.stdout)
    return found

"""The programs whose settings one file and one environment hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.gateway.settings import PREFIX, GatewaySettings
from penstock.worker.settings import WORKER, Settings
from penstock.worker.settings_loading import Program, load

GATEWAY = Program(GatewaySettings, PREFIX, table="gateway", shared=frozenset({"redis_url", "log_level", "log_format"}))
PROGRAMS = (WORKER, GATEWAY)


def load_settings(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Loads a worker's. Raises like `settings_loading.load`."""
    return load(WORKER, PROGRAMS, flags, config)

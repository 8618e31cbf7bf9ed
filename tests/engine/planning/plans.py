"""Plans whose functions are compiled once, as this folder's other programs are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from penstock.engine.config import EngineConfig
from penstock.engine.models import ModelConfig
from penstock.tools import plan as tools
from penstock.tools.plan import Plan


def plan(model: ModelConfig, topology: str, config: EngineConfig, **options: Any) -> Plan:
    """Makes a plan like the product's, from what was kept of the same functions, unless `config` has a folder."""
    kept = Path(jax.config.values["jax_compilation_cache_dir"])
    folder = config.compile_cache_dir or kept
    return tools.plan(model, topology, replace(config, compile_cache_dir=folder), **options)

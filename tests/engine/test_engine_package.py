from __future__ import annotations

import subprocess
import sys

import pytest
from patience import WAIT_S

import penstock.engine
from penstock.engine.engine import Engine

LIGHT = """
import sys
import penstock.engine, penstock.engine.generation_defaults
from penstock.engine import EngineConfig, EngineDriver, Request
heavy = {"jax", "flax", "numpy", "transformers"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_the_door_has_what_it_lists() -> None:
    assert penstock.engine.Engine is Engine
    assert all(hasattr(penstock.engine, name) for name in penstock.engine.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Motor'"):
        _ = penstock.engine.Motor


def test_settings_and_requests_are_there_without_jax() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=WAIT_S)

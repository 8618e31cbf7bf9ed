from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import penstock
import penstock.engine
from penstock.engine.engine import Engine
from tests.support.patience import WAIT_S

LIGHT = """
import sys
import penstock.engine, penstock.engine.generation_defaults
from penstock.engine import EngineConfig, EngineDriver, Request
heavy = {"jax", "flax", "numpy", "transformers"} & sys.modules.keys()
assert not heavy, heavy
"""

START = """
import sys
import penstock.cli.shared.serve
import penstock.engine.engine
print(*{name.partition(".")[0] for name in sys.modules})
"""
# transformers is imported while weights are read, and what fetches models only if one is fetched.
LATER = {"transformers", "huggingface_hub", "fsspec", "httpx", "requests", "tqdm"}
NEVER = {"torch", "scipy", "pandas", "pyarrow", "matplotlib", "orbax", "starlette", "hypothesis", "pytest"}


def test_the_door_has_what_it_lists() -> None:
    assert penstock.engine.Engine is Engine
    assert all(hasattr(penstock.engine, name) for name in penstock.engine.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Motor'"):
        _ = penstock.engine.Motor


def test_every_package_has_what_it_lists() -> None:
    found = [module.name for module in pkgutil.walk_packages(penstock.__path__, "penstock.") if module.ispkg]
    listing = {name: getattr(importlib.import_module(name), "__all__", ()) for name in found}
    assert "penstock.tools.plan" in listing
    missing = [
        f"{name}.{one}" for name, names in listing.items() for one in names if not hasattr(sys.modules[name], one)
    ]
    assert missing == []


def test_settings_and_requests_are_there_without_jax() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=WAIT_S)


def test_a_worker_imports_what_it_starts_with_and_no_more() -> None:
    """A start takes as long as its imports, which run on one processor."""
    done = subprocess.run([sys.executable, "-c", START], check=True, timeout=WAIT_S, stdout=subprocess.PIPE, text=True)
    assert {"jax", "redis"} < set(done.stdout.split())
    assert (LATER | NEVER) & set(done.stdout.split()) == set()

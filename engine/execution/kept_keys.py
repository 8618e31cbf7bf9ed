"""Makes keys for what is kept for the next start: from the machine, the versions, the options and our sources."""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from pathlib import Path

import flax
import jax
import jaxlib.version
import numpy as np

from penstock.engine.processors import cpu_facts, num_processors, vector_features

_SOURCES = Path(__file__).parents[1]
_CHARS = 32
_FOLDERS = ("jax_compilation_cache_dir",)  # options of jax that only name a folder, so they change no program


def key_of(*facts: object) -> str:
    """Returns hex digits that are equal for equal `facts` on one machine, with one version of the code."""
    parts = (_machine(), _software(), _options(), *map(repr, facts))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_CHARS]


def processor_name() -> str:
    return next(iter(cpu_facts("model name")), f"{platform.machine()} {platform.processor()}")


def _machine() -> str:
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    runtime = devices[0].client.platform_version
    vectors = " ".join(vector_features())
    return f"{processor_name()}, {vectors}, {num_processors()} cores, {len(devices)} of {kinds}, {runtime}"


@cache
def _software() -> str:
    """Returns the versions and a digest of the engine's sources, C++ included."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.rglob("*")):
        if path.suffix in (".py", ".cc", ".h"):
            digest.update(path.read_bytes())
    versions = jax.__version__, jaxlib.version.__version__, flax.__version__, np.__version__, platform.python_version()
    return f"{versions} {digest.hexdigest()}"


def _options() -> str:
    """Returns what tells jax and its compilers how to make programs."""
    of_jax = sorted((name, value) for name, value in jax.config.values.items() if name not in _FOLDERS)
    return repr((of_jax, os.environ.get("XLA_FLAGS"), os.environ.get("LIBTPU_INIT_ARGS")))

"""How programs are compiled that tests run a few times, in the tests' processes and in those that they start."""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest

# Compiling a small program is mostly optimising it and emitting its fusions by way of MLIR; older emitters take half of
# the time. jaxlib has them before 0.12, and later ends the process at a flag that it does not know.
_HAS_OLDER_EMITTERS = tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 12)
_EMITTERS = {"xla_cpu_use_fusion_emitters": True} if _HAS_OLDER_EMITTERS else {}
# Cutting a program into parts for several threads costs more than it saves where each processor has a test.
_FLAGS = [*(f"--{flag}=false" for flag in _EMITTERS), "--xla_cpu_parallel_codegen_split_count=1"]
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": " ".join(_FLAGS)}
AS_SHIPPED: dict[str, bool] = _EMITTERS
"""Compiler options for a CPU that undo `QUICK` within this process."""


def compile_quickly() -> None:
    """Sets what JAX reads as it is imported, unless the environment says whether to optimise."""
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        for name, value in QUICK.items():
            os.environ.setdefault(name, value)


def compile_elsewhere_as_shipped(patch: pytest.MonkeyPatch) -> None:
    """Lets processes that the test starts compile as users' do."""
    for name in QUICK:
        patch.delenv(name, raising=False)

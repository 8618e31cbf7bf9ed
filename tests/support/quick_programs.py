"""How programs are compiled that tests run a few times, in the tests' processes and in those that they start."""

from __future__ import annotations

import os

import pytest

# Compiling a small program is mostly optimising it and emitting its fusions by way of MLIR; older emitters take half of
# the time. Cutting it into parts for several threads costs more than it saves where each processor has a test.
EMITTERS = "xla_cpu_use_fusion_emitters"
QUICK = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": f"--{EMITTERS}=false --xla_cpu_parallel_codegen_split_count=1",
}


def compile_quickly() -> None:
    """Sets what JAX reads as it is imported, unless the environment says whether to optimise."""
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        for name, value in QUICK.items():
            os.environ.setdefault(name, value)


def compile_elsewhere_as_shipped(patch: pytest.MonkeyPatch) -> None:
    """Lets processes that the test starts compile as users' do."""
    for name in QUICK:
        patch.delenv(name, raising=False)

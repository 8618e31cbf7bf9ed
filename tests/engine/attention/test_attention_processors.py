"""The C++ attention kernels, compiled for other processors than this one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from penstock.engine.kernels.cpu.compilation import FLAGS
from tests.support.packages import ROOT

HERE = Path(__file__).parent
NATIVE = ROOT / "engine" / "kernels" / "cpu"

# For each -march and further flags, the flag of /proc/cpuinfo that it takes to run here; None: an emulator.
PROCESSORS: dict[str, str | None] = {
    "x86-64": "sse2",
    "haswell": "avx2",
    "haswell -DPENSTOCK_TILES=2": "avx2",
    "skylake-avx512": "avx512bw",
    "skylake-avx512 -DPENSTOCK_TILES=2": "avx512bw",
    "armv8-a": None,
    "armv8.2-a+dotprod": None,
    "armv8.2-a+dotprod+i8mm+bf16": None,
}


def runner_of(processor: str) -> tuple[str, list[str]]:
    """Returns a compiler, and the command that runs its programs."""
    flag = PROCESSORS[processor]
    compiler, runner = ("g++", []) if flag else ("aarch64-linux-gnu-g++", ["qemu-aarch64", "-cpu", "max"])
    if any(shutil.which(name) is None for name in (compiler, *runner[:1])):
        pytest.skip(f"there is no {compiler} here, or nothing to run its programs")
    cpuinfo = Path("/proc/cpuinfo")
    if flag and flag not in (cpuinfo.read_text().split() if cpuinfo.exists() else ()):
        pytest.skip(f"this processor has no {flag}")
    return compiler, runner


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_attention_is_right_on_other_processors(processor: str, tmp_path: Path) -> None:
    compiler, runner = runner_of(processor)
    program = str(tmp_path / "check")
    flags = [*(flag for flag in FLAGS if flag != "-fPIC"), "-static", *f"-march={processor}".split()]
    includes = [f"-I{jax.ffi.include_dir()}", f"-I{NATIVE}"]
    subprocess.run([compiler, *flags, *includes, str(HERE / "attention_check.cc"), "-o", program], check=True)
    found = subprocess.run([*runner, program], check=True, capture_output=True, text=True).stdout
    differences = [list(map(float, line.split())) for line in found.splitlines()]
    assert len(differences) == 5
    for full, half, codes in differences:
        assert full < 1e-6
        assert half < 3e-3
        assert codes < 1e-4

"""Kernel libraries that are built ahead, for processors other than the build machine's: an image then needs no
compiler.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.engine import kept_files
from penstock.engine.kernels.cpu.compilation import compile_library, ffi_version, find_compiler, fingerprint
from penstock.engine.processors import cpu_facts

SHIPPED_DIR = Path(__file__).parent / "shipped"
"""The folder of shipped libraries, beside the sources also in an installed package; empty unless `python -m
penstock.engine.kernels.cpu` was run.
"""


@dataclass(frozen=True, slots=True)
class ProcessorKind:
    """A kind of processor."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]
    """Features by their names in Linux's /proc/cpuinfo. A processor that has all of them runs what `flags` build."""


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})  # x86-64-v3 of the x86-64 psABI
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_X86_V4, _X86_V3 = "-march=x86-64-v4", "-march=x86-64-v3"
_VNNI, _VBMI, _BF16 = "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16"

TARGETS: dict[str, tuple[ProcessorKind, ...]] = {
    "x86_64": (
        ProcessorKind(
            "avx512-bf16", (_X86_V4, _VNNI, _VBMI, _BF16), _V4 | {"avx512_vnni", "avx512vbmi", "avx512_bf16"}
        ),  # Sapphire Rapids, Zen 4
        ProcessorKind("avx512-vbmi", (_X86_V4, _VNNI, _VBMI), _V4 | {"avx512_vnni", "avx512vbmi"}),  # Ice Lake
        ProcessorKind("avx512-vnni", (_X86_V4, _VNNI), _V4 | {"avx512_vnni"}),  # Cascade Lake
        ProcessorKind("avx512", (_X86_V4,), _V4),  # Skylake-SP
        ProcessorKind("avx-vnni", (_X86_V3, "-mavxvnni"), _V3 | {"avx_vnni"}),  # Alder Lake
        ProcessorKind("avx2", (_X86_V3,), _V3),  # Haswell, Zen 1 to 3
        ProcessorKind("x86-64", ("-march=x86-64",), frozenset()),
    ),
    "aarch64": (
        ProcessorKind(
            "i8mm", ("-march=armv8.2-a+dotprod+i8mm",), frozenset({"asimddp", "i8mm"})
        ),  # Graviton 3, Neoverse V1 and N2
        ProcessorKind("dotprod", ("-march=armv8.2-a+dotprod",), frozenset({"asimddp"})),  # Graviton 2, Neoverse N1
        ProcessorKind("aarch64", ("-march=armv8-a",), frozenset()),
    ),
}
"""The targets of each machine type, best first."""


_LINK_FLAGS = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections")
"""Another machine's C++ library may be older than the compiler's own."""


def shipped_library(directory: Path | None = None) -> Path | None:
    """Returns the best library in `SHIPPED_DIR` that has these sources and runs under this XLA, on this processor."""
    directory = directory or SHIPPED_DIR
    if not directory.is_dir():
        return None
    features = _features()
    major, newest = ffi_version()
    fit = (
        _place(directory, each, (major, minor))
        for each in _targets(platform.machine())
        if each.features <= features
        for minor in range(newest, -1, -1)
    )
    return next((path for path in fit if kept_files.is_whole(path)), None)


def build_all(directory: Path = SHIPPED_DIR, machine: str | None = None, compiler: str | None = None) -> Iterator[Path]:
    """Builds what is missing for each kind of processor, and yields each path when it is there.

    Args:
        directory: where the libraries go.
        machine: a type of machine in `TARGETS`; None: this one's.
        compiler: makes code for it; None: the first that is found here.

    Raises:
        NativeUnavailableError: there is no compiler, or it failed.
    """
    compiler = compiler or find_compiler()
    for target in _targets(machine or platform.machine()):
        path = _place(directory, target)
        if not kept_files.is_whole(path):
            compile_library(compiler, target.flags, path, _LINK_FLAGS)
        yield path


def _targets(machine: str) -> tuple[ProcessorKind, ...]:
    return TARGETS.get(machine, ())


def _place(directory: Path, target: ProcessorKind, version: tuple[int, int] | None = None) -> Path:
    return directory / f"kernels-{target.name}-{fingerprint(target.flags, version=version)}.so"


def _features() -> frozenset[str]:
    """Returns the features of the first processor: Linux only lists those that all have."""
    first = next(iter(cpu_facts("flags", "Features")), "")
    return frozenset(first.partition(":")[2].split())

"""Kernel libraries that are built ahead, for processors other than the build machine's: an image then needs no
compiler.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

from penstock.engine import kept_files
from penstock.engine.kernels.cpu.compilation import compile_library, ffi_version, find_compiler, fingerprint
from penstock.engine.kernels.cpu.processor_kinds import TARGETS, ProcessorKind, kinds_here

SHIPPED_DIR = Path(__file__).parent / "shipped"
"""The folder of shipped libraries, beside the sources also in an installed package; empty unless `python -m
penstock.engine.kernels.cpu` was run.
"""


_LINK_FLAGS = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections")
"""Another machine's C++ library may be older than the compiler's own."""


def shipped_library(directory: Path | None = None) -> Path | None:
    """Returns the best library in `SHIPPED_DIR` that has these sources and runs under this XLA, on this processor."""
    directory = directory or SHIPPED_DIR
    if not directory.is_dir():
        return None
    major, newest = ffi_version()
    fit = (_place(directory, kind, (major, minor)) for kind in kinds_here() for minor in range(newest, -1, -1))
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
    for target in TARGETS.get(machine or platform.machine(), ()):
        path = _place(directory, target)
        if not kept_files.is_whole(path):
            compile_library(compiler, target.flags, path, _LINK_FLAGS)
        yield path


def _place(directory: Path, target: ProcessorKind, version: tuple[int, int] | None = None) -> Path:
    return directory / f"kernels-{target.name}-{fingerprint(target.flags, version=version)}.so"

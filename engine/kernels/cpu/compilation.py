"""Builds the C++ sources into one shared library, with the machine's own compiler."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax

from penstock.engine import kept_files
from penstock.engine.kernels.cpu.processor_kinds import kinds_here
from penstock.engine.processors import cpu_facts, num_processors
from penstock.engine.progress import ReportProgress, silent

COMPILERS = ("c++", "g++", "clang++")
SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cc")))
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-w",
    # The parts of -ffast-math that vectorising sums needs, without those that would lose a NaN.
    "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
)  # fmt: skip

_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
_BUILD_TIMEOUT_S = 3600  # ends a compiler that hangs; with a small share of a processor one file takes many minutes


class NativeUnavailableError(Exception):
    """The kernels are not available on this machine; the message says why."""


class UnusableFolderError(NativeUnavailableError):
    """The kernels can't be written to this folder, or can't be loaded from it; another folder may do."""


def build_here(build_dir: Path, progress: ReportProgress = silent) -> Path:
    """Returns the library for this exact processor, in `build_dir`. Builds it unless an intact one is there, and
    reports that it will.

    Raises:
        UnusableFolderError: `build_dir` can't be written to.
        NativeUnavailableError: there is no compiler, or it failed.
    """
    library = library_here(build_dir)
    if not kept_files.is_whole(library):
        compiler = find_compiler()
        progress(0, 0, f"{Path(compiler).name} compiles the kernels for this processor, once; it may take minutes")
        compile_library(compiler, _native_flags(compiler), library)
    return library


def library_here(build_dir: Path) -> Path:
    """Returns where `build_here` puts the library. Raises NativeUnavailableError if there is no compiler."""
    return build_dir / f"kernels-{fingerprint(_native_flags(find_compiler()), _processor())}.so"


def find_compiler() -> str:
    """Returns the path of a compiler. Raises NativeUnavailableError if there is none."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        names = f"{', '.join(COMPILERS[:-1])} or {COMPILERS[-1]}"
        raise NativeUnavailableError(f"there is no C++ compiler ({names}) on PATH")
    return compiler


def fingerprint(flags: Sequence[str], processor: str = "", version: tuple[int, int] | None = None) -> str:
    """Returns a hash of what a library is built from: sources, flags, the version of XLA's interface for kernels, and
    the processor if flags say `native`. `version` is that of the interface; None: this jax's.

    Raises:
        NativeUnavailableError: the sources can't be read.
    """
    try:
        texts = [file.read_text(errors="replace") for file in (*SOURCES, *_HEADERS)]
    except OSError as error:
        raise NativeUnavailableError(f"the sources of the kernels can't be read: {error}") from error
    parts = (*texts, " ".join((*FLAGS, *flags)), "{}.{}".format(*(version or ffi_version())), processor)
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


@functools.cache
def ffi_version() -> tuple[int, int]:
    """Returns the version of the interface between XLA and kernels. Kernels that were built for a lower minor version
    run too.

    Raises:
        NativeUnavailableError: its header can't be read.
    """
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError as error:
        raise NativeUnavailableError(f"the header of XLA's interface can't be read: {error}") from error
    found = dict(re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text, re.MULTILINE))
    if found.keys() != {"MAJOR", "MINOR"}:
        raise NativeUnavailableError(f"{header} names no version of XLA's interface")
    return int(found["MAJOR"]), int(found["MINOR"])


def _native_flags(compiler: str) -> tuple[str, ...]:
    """Returns the flags of the best kind of processor here whose instructions the compiler knows."""
    kinds = (kind for kind in kinds_here() if not kind.has_tiles or _knows_tiles(compiler))
    return next((kind.native_flags for kind in kinds), ("-march=native",))


@functools.cache
def _knows_tiles(compiler: str) -> bool:
    """Tells whether the compiler's assembler knows AMX. Assemblers from before 2020 don't."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "tiles.cc"
        source.write_text('asm("tdpbf16ps %tmm2, %tmm1, %tmm0");')
        try:
            _run(scratch, (compiler, "-c", str(source), "-o", str(source.with_suffix(".o"))))
        except NativeUnavailableError:
            return False
    return True


def compile_library(compiler: str, flags: Sequence[str], library: Path, link_flags: Sequence[str] = ()) -> None:
    """Builds `library` unless it is intact by then, because another process may have built it meanwhile.

    Raises:
        UnusableFolderError: its folder can't be written to.
        NativeUnavailableError: the compiler failed.
    """
    try:
        with kept_files.alone_in(library.parent):
            if not kept_files.is_whole(library):
                _build(compiler, flags, library, link_flags)
    except OSError as error:
        raise UnusableFolderError(f"{library.parent} can't be written to: {error}") from error


def _build(compiler: str, flags: Sequence[str], library: Path, link_flags: Sequence[str]) -> None:
    """Compiles sources in parallel, and installs the library whole or not at all."""
    with tempfile.TemporaryDirectory(dir=library.parent, ignore_cleanup_errors=True) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in SOURCES]
        common = (compiler, *FLAGS, *flags, f"-I{jax.ffi.include_dir()}", "-c")
        with ThreadPoolExecutor(num_processors()) as threads:
            commands = [(*common, str(source), "-o", str(to)) for source, to in zip(SOURCES, objects, strict=True)]
            list(threads.map(partial(_run, scratch), commands))
        linked = Path(scratch) / library.name
        _run(scratch, (compiler, "-shared", *link_flags, *map(str, objects), "-o", str(linked)))
        kept_files.install(linked, library)


def _run(scratch: str, command: Sequence[str]) -> None:
    environment = {**os.environ, "TMPDIR": scratch}  # the compiler writes temporary files too, and /tmp may not exist
    try:
        result = subprocess.run(  # noqa: S603 - our own sources and flags
            command, capture_output=True, text=True, errors="replace", timeout=_BUILD_TIMEOUT_S, check=False,
            env=environment,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{command[0]} could not be run: {error}") from error
    if result.returncode:
        raise NativeUnavailableError(f"{command[0]} failed: {result.stderr.strip()[-2000:]}")


def _processor() -> str:
    """Returns what `-march=native` depends on."""
    facts = sorted(set(cpu_facts("model name", "flags", "Features", "CPU part")))
    return "|".join(facts) or f"{platform.processor()} of {platform.node()}"  # other machines may share the folder

"""Builds the C++ sources into one shared library, and makes its kernels known to XLA."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.errors import ConfigError

ATTENTION, ATTENTION_INT8 = "penstock_ragged_attention", "penstock_ragged_attention_int8"
MATMUL, GROUPED_MATMUL = "penstock_packed_matmul", "penstock_grouped_matmul"
QUANTIZED_MATMUL = "penstock_quantized_matmul"
HALVES = "penstock_halves"
ROUTE, GROUP_ROWS, SUM_ROWS = "penstock_route", "penstock_group_rows", "penstock_sum_rows"
SURVEY = "penstock_survey"
"""What the kernels are called in `jax.ffi.ffi_call`, once `load_library` has been called."""

_SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cc")))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fPIC", "-w",
    # What vectorising sums needs of -ffast-math, without what would lose a NaN.
    "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
)  # fmt: skip
_BUILD_TIMEOUT_S = 300

_loaded: dict[str, ctypes.CDLL] = {}  # by the file's name, which says of what it was built


class NativeUnavailableError(Exception):
    """The kernels cannot be had on this machine; the message says why."""


class NativeLibrary:
    """The kernels as `build_dir` holds them, built when they are first asked for."""

    def __init__(self, build_dir: Path) -> None:
        self._build_dir = build_dir
        self.missing: str | None = None
        """Why they cannot be had, once `load_for` could not have them."""

    def load_for(self, name: str, setting: str) -> ctypes.CDLL | None:
        """For what is set to `native` or to `auto`, which does without them where they cannot be had.

        Raises:
            ConfigError: they cannot be had, and `setting` is `native`.
        """
        if self.missing is None:
            try:
                return load_library(self._build_dir)
            except NativeUnavailableError as error:
                self.missing = str(error)
        if setting == "native":
            raise ConfigError(f"{name} 'native' cannot be built: {self.missing}")
        return None


def load_library(build_dir: Path) -> ctypes.CDLL:
    """Builds what is not built yet, in `build_dir`.

    A process loads it once, from whichever folder is asked for first: XLA refuses a second kernel of the same name.

    Raises:
        NativeUnavailableError: there is no compiler, or it failed.
    """
    path = _build(build_dir)
    if path.name not in _loaded:
        _loaded[path.name] = _register(ctypes.CDLL(str(path)))
    return _loaded[path.name]


def _register(library: ctypes.CDLL) -> ctypes.CDLL:
    handlers = {
        ATTENTION: library.PenstockRaggedAttention,
        ATTENTION_INT8: library.PenstockRaggedAttentionInt8,
        MATMUL: library.PenstockPackedMatmul,
        GROUPED_MATMUL: library.PenstockGroupedMatmul,
        QUANTIZED_MATMUL: library.PenstockQuantizedMatmul,
        HALVES: library.PenstockHalves,
        ROUTE: library.PenstockRoute,
        GROUP_ROWS: library.PenstockGroupRows,
        SUM_ROWS: library.PenstockSumRows,
        SURVEY: library.PenstockSurvey,
    }
    for target, handler in handlers.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")  # type: ignore[no-untyped-call]
    return library


def value_or_empty(value: jax.Array | nnx.Variable[jax.Array] | None) -> jax.Array:
    """As kernels take what a layer may not have."""
    return jnp.zeros((0,), jnp.float32) if value is None else jnp.asarray(value[...])


def panel_width(library: ctypes.CDLL) -> int:
    """Columns of a panel of packed weights, which depends on the processor."""
    library.PenstockPanelWidth.restype = ctypes.c_int64
    return int(library.PenstockPanelWidth())


def _build(build_dir: Path) -> Path:
    """The shared library for these sources, these flags, this processor and this jaxlib."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        raise NativeUnavailableError("there is no C++ compiler (c++, g++ or clang++) on PATH")
    texts = [file.read_text() for file in (*_SOURCES, *_HEADERS)]
    parts = (*texts, " ".join(_FLAGS), jax.__version__, _processor())
    library = build_dir / f"kernels-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    build_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build_dir) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in _SOURCES]
        includes = f"-I{jax.ffi.include_dir()}"
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            commands = [
                (compiler, *_FLAGS, includes, "-c", str(source), "-o", str(to))
                for source, to in zip(_SOURCES, objects, strict=True)
            ]
            list(threads.map(_run, commands))
        linked = Path(scratch) / library.name
        _run((compiler, "-shared", *map(str, objects), "-o", str(linked)))
        with suppress(FileExistsError):  # another process was faster
            os.link(linked, library)
    return library


def _run(command: Sequence[str]) -> None:
    try:
        result = subprocess.run(  # noqa: S603 - our own sources and flags
            command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{command[0]} could not be run: {error}") from error
    if result.returncode:
        raise NativeUnavailableError(f"{command[0]} failed: {result.stderr.strip()[-2000:]}")


def _processor() -> str:
    """What `-march=native` depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text(errors="replace").splitlines()
    return "|".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )

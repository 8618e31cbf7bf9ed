"""Loads the shared library of the C++ kernels, and registers them with XLA."""

from __future__ import annotations

import ctypes
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.engine import kept_files
from penstock.engine.errors import ConfigError
from penstock.engine.kernels.cpu.compilation import (
    NativeUnavailableError,
    UnusableFolderError,
    build_here,
    library_here,
)
from penstock.engine.kernels.cpu.halves import HALF_TABLES
from penstock.engine.kernels.cpu.layout import ENUMERATIONS, KERNELS, check_layout
from penstock.engine.kernels.cpu.shipping import shipped_library
from penstock.engine.processors import num_processors
from penstock.engine.progress import ReportProgress, silent

TABLES = (*KERNELS, *HALF_TABLES, *ENUMERATIONS)
"""All tables of layout.h, in the order of layout.cc."""

_loaded: dict[str, ctypes.CDLL] = {}  # by file name, which has the hash of what it was built from
_found: dict[Path | None, ctypes.CDLL] = {}  # by requested folder, even if its files are gone since


class NativeLibrary:
    """The kernels in `build_dir`, built when they are first requested. None: there is no folder for them."""

    def __init__(self, build_dir: Path | None, progress: ReportProgress = silent) -> None:
        self._build_dir = build_dir
        self._progress = progress
        self.missing: str | None = None
        """Why the kernels are not available, once `load_for` has failed."""
        self.instructions: str | None = None
        """What multiplies bf16 in the kernels, once `load_for` has returned them. Each name is an order of sums."""

    def load_for(self, name: str, setting: str) -> ctypes.CDLL | None:
        """Returns the library for a setting of `native` or `auto`; for `auto`, None if it is not available.

        Raises:
            ConfigError: the kernels are not available, and `setting` is `native`.
        """
        if self.missing is None:
            try:
                library = load_library(self._build_dir, self._progress)
            except NativeUnavailableError as error:
                self.missing = str(error)
            else:
                self.instructions = _instructions(library)
                return library
        if setting == "native":
            raise ConfigError(f"{name} 'native' cannot be built: {self.missing}")
        return None


def is_ready(build_dir: Path | None) -> bool:
    """Tells whether `load_library` finds kernels that are built already."""
    if shipped_library() is not None or build_dir in _found:
        return True
    with suppress(NativeUnavailableError):
        return build_dir is not None and kept_files.is_whole(library_here(build_dir))
    return False


def load_library(build_dir: Path | None, progress: ReportProgress = silent) -> ctypes.CDLL:
    """Loads the library that was shipped for this processor, or the one in `build_dir`, which is built if needed.
    `progress` is called before a compiler runs.

    A process loads it once, from whichever folder is requested first: XLA refuses a second kernel of the same name. If
    nothing can be kept in `build_dir`, or loaded from it, the library is built for this process alone.

    Raises:
        NativeUnavailableError: there is no compiler, or it failed, or what it built cannot be loaded.
        KernelLayoutError: the kernels take or return something else than Python expects.
    """
    if build_dir not in _found:
        _found[build_dir] = _find(build_dir, progress)
    return _found[build_dir]


def _find(build_dir: Path | None, progress: ReportProgress) -> ctypes.CDLL:
    with suppress(UnusableFolderError):
        if (shipped := shipped_library()) is not None:
            return _load(shipped)
    if build_dir is not None:
        try:
            return _load(build_here(build_dir, progress))
        except UnusableFolderError as error:
            kept_files.say_unkept(build_dir, error)
    try:
        scratch = tempfile.TemporaryDirectory(prefix="penstock-native-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UnusableFolderError(f"there is no folder to build the kernels in: {error}") from error
    with scratch as folder:  # the mapping outlives the file
        return _load(build_here(Path(folder), progress))


def _load(path: Path) -> ctypes.CDLL:
    if path.name not in _loaded:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:  # a folder mounted noexec, another libc
            raise UnusableFolderError(f"the kernels cannot be loaded: {error}") from error
        _loaded[path.name] = _register(library)
    return _loaded[path.name]


def _register(library: ctypes.CDLL) -> ctypes.CDLL:
    library.PenstockLayout.restype = ctypes.c_char_p
    check_layout(library.PenstockLayout().decode(), TABLES)
    for kernel in KERNELS:
        handler = jax.ffi.pycapsule(getattr(library, kernel.symbol))
        try:
            jax.ffi.register_ffi_target(kernel.target, handler, platform="cpu")
        except (RuntimeError, ValueError) as error:  # built for an interface that this XLA no longer has
            raise UnusableFolderError(f"XLA refuses the kernels: {error}") from error
    return library


def value_or_empty(value: jax.Array | nnx.Variable[jax.Array] | None) -> jax.Array:
    """Returns the value as kernels take it: empty if a layer does not have it."""
    return jnp.zeros((0,), jnp.float32) if value is None else jnp.asarray(value[...])


def panel_width(library: ctypes.CDLL) -> int:
    """Returns the number of columns in a panel of packed weights, which depends on the processor."""
    library.PenstockPanelWidth.restype = ctypes.c_int64
    return int(library.PenstockPanelWidth())


def pack_panels(library: ctypes.CDLL, columns: np.ndarray, depth: int, panels: np.ndarray) -> None:
    """Transposes columns into panels, on all processors.

    Args:
        library: the kernels.
        columns: i64 `[num_panels, width]`, the addresses of `depth` words each; 0 for a column of zeros.
        depth: number of words in a column: one per feature, or one per two in bf16.
        panels: where they go, contiguous: `[num_panels, depth, width]`, with words of 2 or 4 bytes.
    """
    library.PenstockPackPanels.restype = None
    num_panels, width = columns.shape
    word_bytes = panels.nbytes // (num_panels * depth * width)
    columns = np.ascontiguousarray(columns)
    numbers = map(ctypes.c_int64, (num_panels, depth, word_bytes))
    library.PenstockPackPanels(
        ctypes.c_void_p(columns.ctypes.data),
        *numbers,
        ctypes.c_void_p(panels.ctypes.data),
        ctypes.c_int64(_num_threads()),
    )


_num_threads = cache(num_processors)  # a model has hundreds of panels, and each count reads files


def _instructions(library: ctypes.CDLL) -> str:
    library.PenstockInstructions.restype = ctypes.c_char_p
    return str(library.PenstockInstructions().decode())

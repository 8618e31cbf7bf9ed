"""XLA's compilations: cached on disk between starts, and counted, so that shapes that warm-up missed are noticed."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
from jax import monitoring
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from penstock.engine import kept_files

_Options = dict[str, str | bool]
_T = TypeVar("_T")

_TPU: _Options = {
    # Prefetches into VMEM for a program's next run. A step alternates two programs, so the other would evict the data.
    # And the largest array that fits is chosen: the whole embedding, of which a step reads a few rows.
    "xla_max_cross_program_prefetches": "0",
}
_TPU7X: _Options = {
    # libtpu's compiler prefers 16-bit weights in tiles of 16 x 128, and arrays come in tiles of 8 x 128. In each step,
    # before the loop over layers, it would convert the weights of all layers into a full-size copy.
    "xla_tpu_control_large_2nd_minor_layout_for_x16": False,
}
_TPU7X_PRINTABLE: _Options = {
    # libtpu cannot print a program that gives these to SparseCores.
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": False,
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": False,
    "xla_tpu_enable_offloading_copy_to_sparsecore": False,
}

_OVERLAPPED: _Options = {
    # SparseCores do the all-reduces while the TensorCore computes.
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    # Independent all-reduces would be combined into one, which waits for the inputs of the last.
    "xla_jf_crs_combiner_threshold_in_bytes": "0",
    "xla_tpu_sparse_core_all_reduce_latency_multiplier": "4",
}

_switching = threading.Lock()

_ENTRY_SUFFIX = "-program"
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def keep_compilations(directory: Path) -> str | None:
    """Makes this process look up compiled functions in `directory` and store new ones there.

    Returns None, or the reason why nothing can be stored.
    """
    settings = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # XLA's own caches for GPUs would lie in `directory`, and its path would be part of each key. So if the folder
        # were moved, none of its entries would be found.
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    compilation_cache.get_file_cache = _checked_cache
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"probe")
    except OSError as error:
        kept_files.say_unkept(directory, error, is_told=True)
        return str(error)
    return None


class _CheckedCache(CacheInterface):
    """Replaces jax's own cache, which writes entries in place and maps whatever it reads as a program."""

    def __init__(self, directory: Path) -> None:
        self._path = directory

    def get(self, key: str) -> bytes | None:
        _noted.entry = kept_files.recall(self._path / f"{key}{_ENTRY_SUFFIX}")
        return _noted.entry

    def put(self, key: str, value: bytes) -> None:
        _noted.entry = value
        kept_files.keep_if_possible(self._path / f"{key}{_ENTRY_SUFFIX}", value)


class _Noted(threading.local):
    """The entry that this thread read or wrote last, since it was cleared."""

    entry: bytes | None = None

    def clear(self) -> None:
        self.entry = None


_noted = _Noted()


def with_executable(compile_step: Callable[[], _T]) -> tuple[_T, bytes | None]:
    """Compiles one program, which was lowered before; also returns its executable, as it was first written.

    It is None if no cache of ours read or wrote it: then it came from the process's memory, or from a cache of others.
    """
    _noted.clear()
    made, entry = compile_step(), _noted.entry
    if entry is None:
        return made, None
    executable, _ = compilation_cache.extract_executable_and_time(compilation_cache.decompress_executable(entry))
    return made, executable


def _checked_cache(path: str) -> tuple[CacheInterface, str]:
    return _CheckedCache(Path(path)), path


@contextmanager
def no_kept_compilations() -> Iterator[None]:
    """Disables look-ups and storing within the context, whatever directory is set. One at a time: it is global."""
    name = "jax_enable_compilation_cache"
    with _switching:
        was_on = getattr(jax.config, name)
        jax.config.update(name, False)
        reset_cache()  # otherwise jax keeps what the process's first compilation found
        try:
            yield
        finally:
            jax.config.update(name, was_on)
            reset_cache()


def compiled(lowered: jax.stages.Lowered, device: jax.Device, *, overlaps: bool = False) -> jax.stages.Compiled:
    """Compiles with the right options for this kind of device, as far as its compiler knows them.

    A program that `overlaps` its collectives gets further options.
    """
    options = _options(device, overlaps=overlaps)
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if not options or "No such compile option" not in str(error):
            raise
        return lowered.compile()


class Printed(NamedTuple):
    """The optimised HLO of a program."""

    text: str
    is_as_run: bool  # whether the text is that of the program itself


def printed(
    lowered: jax.stages.Lowered, done: jax.stages.Compiled, device: jax.Device, *, overlaps: bool = False
) -> Printed:
    """Prints what `lowered` was compiled to.

    If the compiler cannot print it, as on TPU7x with several devices, the text is that of the program with nothing
    offloaded to SparseCores, or empty if that fails too.
    """
    with suppress(jax.errors.JaxRuntimeError):
        return Printed(done.as_text() or "", is_as_run=True)
    with suppress(jax.errors.JaxRuntimeError):
        options = _options(device, overlaps=overlaps) | _TPU7X_PRINTABLE
        return Printed(lowered.compile(compiler_options=options).as_text() or "", is_as_run=False)
    return Printed("", is_as_run=False)


def _options(device: jax.Device, *, overlaps: bool) -> _Options:
    if device.platform != "tpu":
        return {}
    options = _TPU | _TPU7X if device.device_kind == "TPU7x" else _TPU
    return options | _OVERLAPPED if overlaps else options


class CompileWatch:
    """Counts compilations since `start` was last called."""

    def __init__(self) -> None:
        self._at_start: int | None = None

    def start(self) -> None:
        self._at_start = _counter.count

    @property
    def count(self) -> int:
        return 0 if self._at_start is None else _counter.count - self._at_start


class _Counter:
    """The one listener for all watches: listeners of jax.monitoring live as long as the process."""

    def __init__(self) -> None:
        self.count = 0
        monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == _COMPILE_EVENT


_counter = _Counter()

"""Compiled steps on disk: a later start loads them, where it would otherwise trace and lower each one.

jax's own cache, in the same folder, can only be asked once a step has been lowered, and lowering takes most of a
warm-up. The files here hold machine code, as do that cache's entries: whoever may write to the folder can run code in
the process.
"""

from __future__ import annotations

import io
import logging
import pickle
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax.experimental import serialize_executable
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from penstock.engine import kept_files
from penstock.engine.execution.compilation import with_executable
from penstock.engine.execution.kept_keys import key_of
from penstock.engine.execution.steps import Step, Steps

_log = logging.getLogger(__name__)

_FOLDER = "steps"
_MAX_BYTES = 2**30  # of all engines' steps: those that were loaded last stay


class KeptSteps:
    """The steps of one engine in `directory`, or nowhere. `facts` are what they depend on besides their arguments."""

    def __init__(self, directory: Path | None, *facts: object) -> None:
        self._folder = None if directory is None else directory / _FOLDER
        self._facts = facts

    def compiled(self, steps: Steps, step: Step) -> jax.stages.Compiled:
        """Returns one of `steps` as an earlier start compiled it; otherwise compiles it and keeps it."""
        if self._folder is None or not jax.config.values["jax_enable_compilation_cache"]:
            return steps.compile(step)
        devices = [device.id for device in steps.devices]
        key = key_of(*self._facts, steps.structure, devices, step.name, _described(step.arguments))
        loaded = _recalled(self._folder / key, key, steps.devices)
        if loaded is not None:
            return loaded
        lowered = step.lower()
        compiled, executable = with_executable(lambda: steps.compile(step, lowered))
        _keep(self._folder / key, key, step.name, compiled, executable)
        return compiled


def _keep(path: Path, key: str, name: str, compiled: jax.stages.Compiled, executable: bytes | None) -> None:
    try:
        whole = pickle.dumps(_serialized(compiled, executable))
    except Exception as error:  # a runtime that cannot write its programs
        _log.debug("step_not_kept: %s: %r", name, error)
        return
    kept_files.keep_if_possible(path, key.encode() + zlib.compress(whole, 1))
    kept_files.forget_oldest(kept_files.files_in(path.parent), _MAX_BYTES)


def _serialized(compiled: jax.stages.Compiled, executable: bytes | None) -> tuple[bytes, Any, Any]:
    """Returns what `deserialize_and_load` takes, with `executable` as it was first written.

    XLA writes an executable for a CPU only once: one that was loaded is written without its functions, and such a file
    would fail when it first runs.

    Raises:
        ValueError: the executable is not known, or this kind of program cannot be written.
    """
    if executable is None:
        raise ValueError("it came from memory, or from a cache whose entries are not known")
    _, in_tree, out_tree = serialize(compiled)  # checks that it can be
    unloaded: Any = compiled._executable._unloaded_executable  # type: ignore[attr-defined]  # noqa: SLF001
    file = io.BytesIO()
    _Pickler(file, executable).dump((unloaded, jax.tree.leaves(compiled.args_info), compiled._no_kwargs))  # noqa: SLF001
    return file.getvalue(), in_tree, out_tree


class _Pickler(serialize_executable._JaxPjrtPickler):  # noqa: SLF001
    """Pickles as jax's own `serialize` does, with other bytes for the executable."""

    def __init__(self, file: io.BytesIO, executable: bytes) -> None:
        super().__init__(file)
        self._bytes = executable

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if isinstance(value, xla_client.LoadedExecutable):
            return "exec", self._bytes
        named: tuple[Any, ...] | None = super().persistent_id(value)  # type: ignore[no-untyped-call]
        return named


def _recalled(path: Path, key: str, devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
    """Returns None if the file is missing, damaged or another program's, or if this runtime cannot load it."""
    data = kept_files.recall(path)
    if data is None:
        if path.is_symlink() or path.exists():
            _log.debug("kept_step_passed_over: %s is damaged", path)
        return None
    if not data.startswith(key.encode()):
        _log.debug("kept_step_passed_over: %s is another program's", path)
        return None
    try:
        payload, in_tree, out_tree = pickle.loads(zlib.decompress(data[len(key) :]))  # noqa: S301  # machine code anyway
        loaded: jax.stages.Compiled = deserialize_and_load(payload, in_tree, out_tree, execution_devices=devices)
    except Exception as error:
        _log.debug("kept_step_passed_over: %s: %r", path, error)
        return None
    kept_files.mark_used(path)
    return loaded


def _described(arguments: Any) -> str:
    """Returns shapes, types, placements and layouts, and how they are nested."""
    leaves, tree = jax.tree.flatten(arguments)
    described = [
        (leaf.shape, str(leaf.dtype), leaf.weak_type, repr(leaf.sharding), repr(leaf.format)) for leaf in leaves
    ]
    return f"{described} {tree}"

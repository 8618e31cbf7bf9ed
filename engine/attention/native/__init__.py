"""Ragged paged attention for CPUs in C++, built by the machine's own compiler when it is first used.

Nothing needs a compiler to install or to run: where there is none, the XLA form does the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import jax
import numpy as np

from engine.attention.contract import AttentionBackend, CacheArray, KVCacheSpec, RaggedBatch
from engine.errors import ConfigError
from engine.models.decoder import LayerCache

_SOURCE = Path(__file__).parent / "ragged.cc"
_TARGET = "penstock_ragged_attention"
_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-w",
    # What vectorising sums needs of -ffast-math, without what would lose a NaN.
    "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
)  # fmt: skip
_BUILD_TIMEOUT_S = 120


class NativeUnavailableError(Exception):
    """The native form cannot be used on this machine; the message says why."""


class NativeAttention(AttentionBackend):
    """Keys and values are `[num_pages, num_kv_heads, page_size, head_dim]`, of the model's own type: f32 or bf16."""

    name = "native"
    is_stacked = False

    def __init__(self, build_dir: Path) -> None:
        """Builds what is not built yet.

        Raises:
            NativeUnavailableError: there is no compiler, or it failed.
        """
        _register(build_dir)

    def cache_dtype(self, dtype: str) -> str:
        return dtype

    def cache_arrays(self, spec: KVCacheSpec) -> tuple[tuple[CacheArray, CacheArray], ...]:
        shape = (spec.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
        half = CacheArray(shape, spec.dtype, (None, "kv_heads", None, None))
        return ((half, half),) * spec.num_layers

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: LayerCache,
        batch: RaggedBatch,
        *,
        sliding_window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        if soft_cap is not None:
            raise ConfigError(f"attention 'native' has no soft cap, and the model's is {soft_cap}; set xla")
        keys, values = cache
        out_types = [jax.typeof(array) for array in (q, keys, values)]
        call = jax.ffi.ffi_call(_TARGET, out_types, input_output_aliases={3: 1, 4: 2})
        out, keys, values = call(
            q, k, v, keys, values, batch.slots, batch.kv_lens, batch.page_indices, batch.cu_q_lens, batch.num_seqs,
            scale=np.float32(q.shape[-1] ** -0.5 if scale is None else scale),
            window=np.int64(sliding_window or 0),
        )  # fmt: skip
        return out, (keys, values)


@cache
def _register(build_dir: Path) -> None:
    library = ctypes.CDLL(str(_build(build_dir)))
    handler = jax.ffi.pycapsule(library.PenstockRaggedAttention)  # type: ignore[no-untyped-call]
    jax.ffi.register_ffi_target(_TARGET, handler, platform="cpu")


def _build(build_dir: Path) -> Path:
    """The shared library for this source, these flags, this processor and this jaxlib."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        raise NativeUnavailableError("there is no C++ compiler (c++, g++ or clang++) on PATH")
    parts = (_SOURCE.read_text(), " ".join(_FLAGS), jax.__version__, _processor())
    library = build_dir / f"ragged-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    build_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=build_dir, suffix=".so") as unfinished:
        command = [compiler, *_FLAGS, f"-I{jax.ffi.include_dir()}", str(_SOURCE), "-o", unfinished.name]
        try:
            result = subprocess.run(  # noqa: S603 - our own source and flags
                command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeUnavailableError(f"{compiler} could not be run: {error}") from error
        if result.returncode:
            raise NativeUnavailableError(f"{compiler} failed: {result.stderr.strip()[-2000:]}")
        with suppress(FileExistsError):  # another process was faster
            os.link(unfinished.name, library)
    return library


def _processor() -> str:
    """What `-march=native` depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text(errors="replace").splitlines()
    return "|".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )

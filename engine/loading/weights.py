"""Reads parameters out of safetensors files, of each only what a device holds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from penstock.engine.errors import CheckpointError
from penstock.engine.loading.files import check_file
from penstock.engine.models import ParamPath
from penstock.engine.models.axes import logical_axes
from penstock.engine.sharding import Placement

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """What a file's header says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    kind: str  # safetensors' name of the element type

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(re.sub(r"\D", "", self.kind)) // 8


@dataclass(frozen=True, slots=True)
class Rows:
    """Which of a fused tensor's rows a parameter is, by its last axis: those from `first` on, of `total`."""

    first: int
    total: int


@dataclass(frozen=True, slots=True)
class Source:
    """Where a parameter comes from: one tensor or rows of it, or as many as its first axes have places.

    Those are the layers of a stacked decoder, and the experts where each has a tensor of its own.
    """

    path: ParamPath
    shape: tuple[int, ...]
    dtype: jnp.dtype
    names: tuple[str, ...]  # of the places of the first axes, the last of those running fastest
    num_spread: int  # first axes that are spread over tensors
    copies: int = 1  # times that each KV head is repeated
    head_dim: int = 1
    rows: Rows | None = None  # None: all

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of each of its tensors. Kernels are stored transposed, `[out, in]`."""
        *shape, _ = self.shape[self.num_spread :]
        num_rows = self._num_rows if self.rows is None else self.rows.total
        return (*shape[:-1], num_rows, shape[-1]) if self.path[-1] == "kernel" else (*shape, num_rows)

    def num_bytes(self, stored: Mapping[str, Stored]) -> int:
        """Of what its tensors hold for it."""
        num_bytes = sum(stored[name].num_bytes for name in self.names)
        return num_bytes if self.rows is None else num_bytes * self._num_rows // self.rows.total

    def stored_index(self, index: Index) -> Index:
        """Where in a stored tensor the parameter's `index` is, before it is transposed."""
        if self.rows is None:
            return index
        start, stop, _ = index[-1].indices(self._num_rows)
        return (*index[:-1], slice(self.rows.first + start, self.rows.first + stop))

    @property
    def _num_rows(self) -> int:
        return self.shape[-1] // self.copies


class WeightFiles:
    """Open files of a checkpoint. A context manager."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def array(self, source: Source, placement: Placement | None) -> jax.Array:
        """The parameter on its devices, each of which is given its share and nothing else."""
        if placement is None:
            return jnp.asarray(self._read(source, (slice(None),) * len(source.shape)))
        read: dict[str, np.ndarray] = {}

        def share(index: Index | None) -> np.ndarray:
            key = str(index)
            if key not in read:  # devices that hold the same are asked one after the other
                read.clear()
                read[key] = self._read(source, index or ())
            return read[key]

        sharding = placement.sharding(logical_axes(source.path, len(source.shape)))
        return jax.make_array_from_callback(source.shape, sharding, share)

    def _read(self, source: Source, index: Index) -> np.ndarray:
        if not source.num_spread:
            return self._read_one(source, source.names[0], index)
        spread, of_each = index[: source.num_spread], index[source.num_spread :]
        names = np.array(source.names, dtype=object).reshape(source.shape[: source.num_spread])[spread]
        sizes = [len(range(*part.indices(size))) for part, size in zip(index, source.shape, strict=True)]
        array = np.empty(sizes, source.dtype)  # filled in place: a list of all tensors would be in memory beside it
        for place, name in np.ndenumerate(names):
            array[place] = self._read_one(source, str(name), of_each)
        return array

    def _read_one(self, source: Source, name: str, index: Index) -> np.ndarray:
        array: np.ndarray
        tensor = self._opened(self._stored[name].file).get_slice(name)
        if source.copies > 1:
            index, cut = _before_copying(source, index)
        index = source.stored_index(index)
        array = _transposed(tensor, index) if source.path[-1] == "kernel" else tensor[index]
        if source.copies > 1:
            heads = array.reshape(*array.shape[:-1], -1, source.head_dim)
            array = np.repeat(heads, source.copies, axis=-2).reshape(*array.shape[:-1], -1)[..., cut]
        return array.astype(source.dtype, copy=False)

    def _opened(self, file: Path) -> Any:
        if file not in self._files:
            self._files[file] = self._stack.enter_context(open_weights(file))
        return self._files[file]


def open_weights(file: Path) -> Any:
    """A context manager over the file's tensors.

    Raises:
        CheckpointError: the file cannot be read, or is no safetensors file.
    """
    check_file(file)
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error


def _transposed(tensor: Any, index: Index) -> np.ndarray:
    *lead, first, last = index
    array: np.ndarray = tensor[(*lead, last, first)]
    return array.swapaxes(-1, -2)


def _before_copying(source: Source, index: Index) -> tuple[Index, slice]:
    """What to read so that, with each KV head repeated, it holds `index`; and where in that `index` then is."""
    start, stop, _ = index[-1].indices(source.shape[-1])
    width = source.copies * source.head_dim  # of all copies of one stored head
    first, end = start // width, -(-stop // width)
    stored = slice(first * source.head_dim, end * source.head_dim)
    return (*index[:-1], stored), slice(start - first * width, stop - first * width)

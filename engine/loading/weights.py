"""Reads parameters out of safetensors files, of each only what a device holds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from penstock.engine.errors import CheckpointError
from penstock.engine.formats.leaf import Index, Leaf
from penstock.engine.loading.files import check_file
from penstock.engine.loading.packed import PackedSource
from penstock.engine.loading.rows import before_copying
from penstock.engine.models import ParamPath
from penstock.engine.models.axes import logical_axes
from penstock.engine.sharding import Placement

FLOAT_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as safetensors names them
_BITS = re.compile(r"(?:BF|F|I|U)(\d+)")


@dataclass(frozen=True, slots=True)
class Stored:
    """What a file's header says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    kind: str  # safetensors' name of the element type

    @property
    def num_bytes(self) -> int:
        bits = _BITS.match(self.kind)  # of blocks, the shape is in bytes
        return math.prod(self.shape) * int(bits[1] if bits else 8) // 8


@dataclass(frozen=True, slots=True)
class Rows:
    """Which of a fused tensor's rows a parameter is, by its last axis: each `step`-th from `first` on, of `total`."""

    first: int
    total: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Source:
    """Where a parameter comes from: one tensor or rows of it, or as many as its first axes have places.

    Those are the layers of a stacked decoder, and the experts where each has a tensor of its own.
    """

    path: ParamPath
    shape: tuple[int, ...]  # without padding
    dtype: jnp.dtype
    names: tuple[str, ...]  # of the places of the first axes, the last of those running fastest
    num_spread: int  # first axes that are spread over tensors
    copies: int = 1  # times that each KV head is repeated
    head_dim: int = 1
    rows: Rows | None = None  # None: all
    is_plain: bool = False  # kernels mostly are not: those are stored transposed, `[out, in]`
    padding: tuple[int, ...] = ()  # how many zeros stand behind it along each axis, in no file; (): none

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return tuple(map(add, self.shape, self.padding)) if self.padding else self.shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of each of its tensors."""
        *shape, _ = self.shape[self.num_spread :]
        num_rows = self._num_rows if self.rows is None else self.rows.total
        return (*shape[:-1], num_rows, shape[-1]) if self.is_transposed else (*shape, num_rows)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(FLOAT_TYPES)

    def accepts(self, shape: tuple[int, ...]) -> bool:
        return shape == self.stored_shape

    def num_bytes(self, stored: Mapping[str, Stored]) -> int:
        """Of what its tensors hold for it."""
        num_bytes = sum(stored[name].num_bytes for name in self.names)
        return num_bytes if self.rows is None else num_bytes * self._num_rows // self.rows.total

    def stored_index(self, index: Index) -> Index:
        """Where in a stored tensor the parameter's `index` is, before it is transposed."""
        if self.rows is None:
            return index
        start, stop, _ = index[-1].indices(self._num_rows)
        first, step = self.rows.first, self.rows.step
        return (*index[:-1], slice(first + start * step, first + (stop - 1) * step + 1, step))

    @property
    def is_transposed(self) -> bool:
        return self.path[-1] == "kernel" and not self.is_plain

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

    def array(self, source: Source | PackedSource, placement: Placement | None) -> jax.Array:
        """The parameter on its devices, each of which is given its share and nothing else."""
        if placement is None:
            return jnp.asarray(self._share(source, (slice(None),) * len(source.shape)))
        read: dict[str, np.ndarray] = {}

        def share(index: Index | None) -> np.ndarray:
            key = str(index)
            if key not in read:  # devices that hold the same are asked one after the other
                read.clear()
                read[key] = self._share(source, index or ())
            return read[key]

        sharding = placement.sharding(logical_axes(source.path, len(source.shape)), source.padded_shape)
        return jax.make_array_from_callback(source.padded_shape, sharding, share)

    def _share(self, source: Source | PackedSource, index: Index) -> np.ndarray:
        if not source.padding:
            return self._read(source, index)
        stored, padding = _before_padding(source, index)
        array = self._read(source, stored)
        return np.pad(array, padding) if any(map(any, padding)) else array

    def check(self, name: str, leaf: Leaf) -> None:
        """Reads what must be as `leaf` says.

        Raises:
            CheckpointError: it is not.
        """
        with self._named(name):
            leaf.read(self.tensor(name).__getitem__, leaf.stored_shape, ())

    def _read(self, source: Source | PackedSource, index: Index) -> np.ndarray:
        if not source.num_spread:
            return self._read_one(source, source.names[0], index)
        spread, of_each = index[: source.num_spread], index[source.num_spread :]
        names = np.array(source.names, dtype=object).reshape(source.shape[: source.num_spread])[spread]
        sizes = [len(range(*part.indices(size))) for part, size in zip(index, source.shape, strict=True)]
        array = np.empty(sizes, source.dtype)  # filled in place: a list of all tensors would be in memory beside it
        for place, name in np.ndenumerate(names):
            array[place] = self._read_one(source, str(name), of_each)
        return array

    def _read_one(self, source: Source | PackedSource, name: str, index: Index) -> np.ndarray:
        array: np.ndarray
        tensor = self.tensor(name)
        if isinstance(source, PackedSource):
            with self._named(name):
                return source.read(tensor.__getitem__, index)
        if source.copies > 1:
            rows, cut = before_copying(index[-1], source.shape[-1], source.copies, source.head_dim)
            index = (*index[:-1], rows)
        index = source.stored_index(index)
        if source.is_transposed:
            array = _transposed(tensor, index)
        elif source.rows is not None and source.rows.step > 1:
            array = _alternating(tensor, index, source.dtype)
        else:
            array = tensor[index]
        if source.copies > 1:
            heads = array.reshape(*array.shape[:-1], -1, source.head_dim)
            array = np.repeat(heads, source.copies, axis=-2).reshape(*array.shape[:-1], -1)[..., cut]
        return array.astype(source.dtype, copy=False)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Names the tensor that an error is about."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"tensor {name} {error}, in {self._stored[name].file.name}") from None

    def tensor(self, name: str) -> Any:
        """What can be indexed to read some of it."""
        stored = self._stored[name]
        return _mapped(stored, name) if stored.kind == "F8_E4M3" else self._opened(stored.file).get_slice(name)

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


def _mapped(stored: Stored, name: str) -> np.ndarray:
    """A tensor of a type that safetensors cannot give to numpy; the file has been opened, and so checked, before."""
    with stored.file.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        start, _ = json.loads(file.read(size))[name]["data_offsets"]
    return np.memmap(stored.file, jnp.float8_e4m3fn, "r", 8 + size + start, stored.shape)


def _transposed(tensor: Any, index: Index) -> np.ndarray:
    *lead, first, last = index
    array: np.ndarray = tensor[(*lead, last, first)]
    return array.swapaxes(-1, -2)


def _alternating(tensor: Any, index: Index, dtype: jnp.dtype) -> np.ndarray:
    """With a step on the last axis. Place by place of the first: the library takes long for steps, and much memory."""
    first, *between, last = index
    shape = tensor.get_shape()
    array = np.empty([len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True)], dtype)
    for to, place in enumerate(range(*first.indices(shape[0]))):
        array[to] = tensor[(slice(place, place + 1), *between, slice(last.start, last.stop))][0, ..., :: last.step]
    return array


def _before_padding(source: Source | PackedSource, index: Index) -> tuple[Index, list[tuple[int, int]]]:
    """What to read for `index` of a padded parameter, and how many zeros go before and behind it along each axis."""
    stored, zeros = [], []
    for part, size, padding in zip(index, source.shape, source.padding, strict=True):
        start, stop, _ = part.indices(size + padding)
        num_stored = max(0, min(stop, size) - start)
        stored.append(slice(start, start + num_stored) if num_stored else slice(0, 0))  # files have no place behind
        zeros.append((0, stop - start - num_stored))
    return tuple(stored), zeros

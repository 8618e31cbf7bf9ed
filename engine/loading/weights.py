"""Reads parameters from safetensors files: of each only what a device holds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import add
from pathlib import Path
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from penstock.engine.errors import CheckpointError
from penstock.engine.formats.buffers import PIECE_BYTES, device_buffer, fill, pieces
from penstock.engine.formats.tensor_mapping import Index, Leaf
from penstock.engine.loading.files import check_file
from penstock.engine.loading.kv_scales import KVScaleSource
from penstock.engine.loading.packed import PackedSource
from penstock.engine.loading.rows import FusedRows, stored_part
from penstock.engine.models import ParamPath
from penstock.engine.models.axes import logical_axes
from penstock.engine.sharding.placement import Placement

FLOAT_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as safetensors names them
_MAPPED_TYPES = {kind: jnp.dtype(name) for kind, name in {**FLOAT_TYPES, "F8_E4M3": "float8_e4m3fn"}.items()}
_BITS = re.compile(r"(?:BF|F|I|U)(\d+)")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor's description in a file's header."""

    file: Path
    shape: tuple[int, ...]
    kind: str  # safetensors' name of the element type

    @property
    def num_bytes(self) -> int:
        bits = _BITS.match(self.kind)  # for blocks, the shape is in bytes
        return math.prod(self.shape) * int(bits[1] if bits else 8) // 8


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """The source of a parameter: one tensor or rows of it, or a tensor for each place of its first axes.

    The first axes are the layers of a stacked decoder, and the experts if each has a tensor of its own.
    """

    path: ParamPath
    shape: tuple[int, ...]  # without padding
    dtype: jnp.dtype
    names: tuple[str, ...]  # for the places of the first axes, the last one running fastest
    num_spread: int  # number of leading axes that are spread over tensors
    copies: int = 1  # number of times that each KV head is repeated
    head_dim: int = 1
    rows: FusedRows | None = None  # None: all
    is_plain: bool = False  # most kernels are not: they are stored transposed, `[out, in]`
    may_be_plain: bool = False  # the shapes of its tensors say whether it is
    padding: tuple[int, ...] = ()  # number of zeros after it along each axis, which no file has; (): none

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return tuple(map(add, self.shape, self.padding)) if self.padding else self.shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of each of its tensors."""
        shape = list(self.shape[self.num_spread :])
        shape[self._row_axis] = self._num_rows if self.rows is None else self.rows.total
        return (*shape[:-2], shape[-1], shape[-2]) if self.is_transposed else tuple(shape)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(FLOAT_TYPES)

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Checks whether a stored tensor has the right shape. A router's correction may have an axis of 1 before it."""
        return shape == self.stored_shape or (self.path[-1] == "correction" and shape == (1, *self.stored_shape))

    def as_found(self, stored: Mapping[str, Stored]) -> Self:
        """Returns the source with the orientation that its tensors have, if they may have either."""
        plain, found = replace(self, is_plain=True), stored.get(self.names[0])
        is_plain = self.may_be_plain and found is not None and found.shape != self.stored_shape
        return plain if is_plain else self

    @property
    def cut(self) -> tuple[int, int]:
        """The axis of one tensor's share along which pieces are least scattered in a file, and the multiple that their
        sizes need.
        """
        return (1 if self.is_transposed and len(self.shape) - self.num_spread == 2 else 0), 1

    def num_bytes(self, stored: Mapping[str, Stored]) -> int:
        """Returns the bytes that its tensors hold for it."""
        num_bytes = sum(stored[name].num_bytes for name in self.names)
        return num_bytes if self.rows is None else num_bytes * self._num_rows // self.rows.total

    def stored_index(self, index: Index) -> tuple[Index, np.ndarray | None]:
        """Returns the place of the parameter's `index` in a stored tensor, before transposing, and which of the rows
        there belong to it; None: all.
        """
        if self.rows is None:
            return index, None
        axis = self._row_axis % len(index)
        rows, own = self.rows.stored(slice(*index[axis].indices(self._num_rows)))
        return (*index[:axis], rows, *index[axis + 1 :]), own

    @property
    def is_transposed(self) -> bool:
        return self.path[-1] == "kernel" and not self.is_plain

    @property
    def _num_rows(self) -> int:
        return self.shape[self._row_axis] // self.copies

    @property
    def _row_axis(self) -> int:
        return -1 if self.rows is None else self.rows.axis


AnySource: TypeAlias = ParameterSource | PackedSource | KVScaleSource
"""The source of a parameter, of an array of a packed weight, or of scales of the KV cache."""


class WeightFiles:
    """The open weight files of a checkpoint. A context manager."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored
        self._files: dict[Path, Any] = {}
        self._bytes: dict[Path, tuple[np.ndarray, Mapping[str, Any]]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def array(self, source: AnySource, placement: Placement | None) -> jax.Array:
        """Returns the parameter on its devices, each of which gets only its share."""
        if placement is None:
            array: jax.Array = jax.device_put(self._share(source, (slice(None),) * len(source.shape)))
            return array
        read: dict[str, np.ndarray] = {}

        def share(index: Index | None) -> np.ndarray:
            key = str(index)
            if key not in read:  # devices with the same share are asked one after the other
                read.clear()
                read[key] = self._share(source, index or ())
            return read[key]

        sharding = placement.sharding(logical_axes(source.path, len(source.shape)), source.padded_shape)
        return jax.make_array_from_callback(source.padded_shape, sharding, share)

    def kernel(self, source: ParameterSource) -> np.ndarray:
        """Returns a kernel in host memory, transposed as in the files. What one tensor holds as it is stays mapped."""
        whole = (slice(None),) * len(source.shape)
        if not source.num_spread and not source.padding:
            name = source.names[0]
            array = self._read(source, name, self.mapped(name), _without_padding(source, whole))
            if array.dtype == source.dtype:
                return array
        return self._share(source, whole, is_transposed=source.is_transposed)

    def check(self, name: str, leaf: Leaf) -> None:
        """Reads a tensor whose contents must be as `leaf` says.

        Raises:
            CheckpointError: they are not.
        """
        with self._named(name):
            leaf.read(self.tensor(name).__getitem__, leaf.stored_shape, ())

    def _share(self, source: AnySource, index: Index, *, is_transposed: bool = False) -> np.ndarray:
        """Reads a device's share, in small pieces, into memory that the device may keep: the share is whole
        only here. `is_transposed` says that its last two axes are swapped in memory.
        """
        sizes = [len(range(*part.indices(size))) for part, size in zip(index, source.padded_shape, strict=True)]
        if is_transposed:
            array = device_buffer((*sizes[:-2], sizes[-1], sizes[-2]), np.dtype(source.dtype)).swapaxes(-1, -2)
        else:
            array = device_buffer(sizes, np.dtype(source.dtype))
        stored = _without_padding(source, index)
        self._fill(array[tuple(slice(part.stop - part.start) for part in stored)], source, stored)
        return array

    def _fill(self, array: np.ndarray, source: AnySource, index: Index) -> None:
        spread, of_each = index[: source.num_spread], index[source.num_spread :]
        names = np.array(source.names, dtype=object).reshape(source.shape[: source.num_spread])[spread]
        for place, name in np.ndenumerate(names):
            self._fill_one(array[place], source, str(name), of_each)

    def _fill_one(self, array: np.ndarray, source: AnySource, name: str, index: Index) -> None:
        axis, multiple = source.cut
        size, tensor = source.shape[source.num_spread + axis], self.tensor(name)
        at_once = PIECE_BYTES * size // max(1, self._stored[name].num_bytes) // multiple * multiple
        before = (slice(None),) * axis
        for piece, to in pieces(index[axis], max(at_once, multiple)):
            of_piece = (*index[:axis], piece, *index[axis + 1 :])
            fill(array[(*before, to)], self._read(source, name, tensor, of_piece))

    def _read(self, source: AnySource, name: str, tensor: Any, index: Index) -> np.ndarray:
        array: np.ndarray
        if not isinstance(source, ParameterSource):
            with self._named(name):
                return source.read(tensor.__getitem__, index)
        if source.copies > 1:
            rows, cut = stored_part(index[-1], source.shape[-1], source.copies, source.head_dim)
            index = (*index[:-1], rows)
        index, own = source.stored_index(index)
        num_lead = len(self._stored[name].shape) - len(index)  # axes of 1
        index = ((slice(None),) * num_lead) + index
        array = _transposed(tensor, index) if source.is_transposed else tensor[index]
        array = array.reshape(array.shape[num_lead:])
        if own is not None and source.rows is not None:
            array = array.take(own, source.rows.axis)
        if source.copies > 1:
            heads = array.reshape(*array.shape[:-1], -1, source.head_dim)
            array = np.repeat(heads, source.copies, axis=-2).reshape(*array.shape[:-1], -1)[..., cut]
        return array

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Adds the tensor's name to an error."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"tensor {name} {error}, in {self._stored[name].file.name}") from None

    def tensor(self, name: str) -> Any:
        """Returns an object that reads the parts that it is indexed with."""
        stored = self._stored[name]
        # safetensors cannot give f8 to numpy
        return self.mapped(name) if stored.kind == "F8_E4M3" else self._opened(stored.file).get_slice(name)

    def mapped(self, name: str) -> Any:
        """Returns an object as `tensor` does, whose parts may be read where they are in the file."""
        stored = self._stored[name]
        self._opened(stored.file)  # checks the file
        if stored.file not in self._bytes:
            self._bytes[stored.file] = _tensor_bytes(stored.file)
        data, places = self._bytes[stored.file]
        array: np.ndarray = data[slice(*places[name]["data_offsets"])].view(_MAPPED_TYPES[stored.kind])
        return array.reshape(stored.shape)

    def _opened(self, file: Path) -> Any:
        if file not in self._files:
            self._files[file] = self._stack.enter_context(open_weights(file))
        return self._files[file]


def open_weights(file: Path) -> Any:
    """Returns a context manager over the file's tensors.

    Raises:
        CheckpointError: the file cannot be read, or is not a safetensors file.
    """
    check_file(file)
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error


def _tensor_bytes(file: Path) -> tuple[np.ndarray, Mapping[str, Any]]:
    """Returns everything after the header, mapped, and the header, by tensor name."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        return np.asarray(np.memmap(file, np.uint8, "r", 8 + size)), json.loads(opened.read(size))


def _transposed(tensor: Any, index: Index) -> np.ndarray:
    *lead, first, last = index
    array: np.ndarray = tensor[(*lead, last, first)]
    return array.swapaxes(-1, -2)


def _without_padding(source: AnySource, index: Index) -> Index:
    """Returns the part of `index`, of a parameter that may be padded, that is stored."""
    stored = []
    for part, size, padded in zip(index, source.shape, source.padded_shape, strict=True):
        start, stop, _ = part.indices(padded)
        stored.append(slice(min(start, size), min(stop, size)))
    return tuple(stored)

"""Reads the header of a GGUF file: metadata, and where tensors are (docs/gguf.md in github.com/ggml-org/ggml).

Names and sizes of types come from the `gguf` library. Its reader is not used: an array that claims 2^60 elements keeps
it busy until memory is full, and the vocabulary of a real model costs it hundreds of megabytes.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from penstock.engine.errors import CheckpointError, shown
from penstock.engine.loading.files import check_file

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_HEADER_BYTES = 2**27  # of metadata and tensor descriptions; the largest vocabularies in use have about 20 MB
MAX_FIELDS, MAX_TENSORS, MAX_ELEMENTS, MAX_DIMS, MAX_NAME = 2**12, 2**17, 2**21, 4, 2**8
DEFAULT_ALIGNMENT = 32

Value = int | float | bool | str | list[Any]

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Location of a tensor, and the type of its blocks."""

    file: Path
    shape: tuple[int, ...]  # of its elements, in numpy's order
    kind: str  # ggml's name of the type
    start: int  # byte in the file

    @property
    def row_bytes(self) -> int:
        features, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        return self.shape[-1] // features * num_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a file, or of all files of a model. Tensors lie inside their file and do not overlap."""

    file: Path  # of several, the first
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    @cached_property
    def architecture(self) -> str:
        """The name of the architecture. Raises CheckpointError if there is none."""
        return self.text("general.architecture")

    def text(self, key: str) -> str:
        """Reads a string. Raises CheckpointError if it is missing or not a string."""
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.file.name}: {key} must be text, not {shown(value)}")
        return value

    def items(self, key: str, kind: type[Any]) -> list[Any]:
        """Reads an array; empty if it is missing.

        Raises:
            CheckpointError: it is not an array of this type.
        """
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise CheckpointError(f"{self.file.name}: {key} must be an array of {kind.__name__}, not {shown(value)}")
        return value


def read_header(file: Path) -> GGUFHeader:
    """Reads the header, and nothing after the tensors' descriptions.

    Raises:
        CheckpointError: the file cannot be read, is not a GGUF file, or its description is inconsistent.
    """
    check_file(file)
    try:
        with file.open("rb") as opened:
            size = file.stat().st_size
            if size < len(MAGIC) + 20:
                raise CheckpointError(f"{file} has {size} bytes, too few for a GGUF file")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _Scan(file, mapped).header()
    except OSError as error:
        raise CheckpointError(f"{file} is not readable: {error}") from error


class _Scan:
    """A parser of a header. Every length is checked against the rest of the file before anything is allocated
    for it.
    """

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file, self._data, self._at = file, data, 0
        self._end = min(len(data), MAX_HEADER_BYTES)

    def header(self) -> GGUFHeader:
        if self._bytes(4, "the magic number") != MAGIC:
            raise self._wrong(f"begins with {self._data[:4]!r}, not with {MAGIC!r}: it is not a GGUF file")
        version = self._number("I", "version")
        if version not in VERSIONS:
            raise self._wrong(f"is of GGUF version {version}, expected {' or '.join(map(str, VERSIONS))}")
        num_tensors = self._count("tensors", MAX_TENSORS)
        num_fields = self._count("metadata fields", MAX_FIELDS)
        metadata = dict(self._unique(num_fields, "metadata", self._field))
        described = dict(self._unique(num_tensors, "tensor", self._tensor))
        start = self._aligned(metadata)
        tensors = {name: replace(tensor, start=start + tensor.start) for name, tensor in described.items()}
        self._check_places(tensors)
        return GGUFHeader(self._file, metadata, tensors)

    def _unique(self, count: int, what: str, read: Any) -> Iterator[tuple[str, Any]]:
        names = set()
        for number in range(count):
            name = self._text(f"the name of {what} {number}")
            if len(name) > MAX_NAME:
                raise self._wrong(f"has a name of {len(name)} characters, {shown(name)}, expected at most {MAX_NAME}")
            if name in names:
                raise self._wrong(f"has {what} {shown(name)} twice")
            names.add(name)
            yield name, read(name)

    def _field(self, name: str) -> Value:
        kind = self._value_type(name)
        if kind is GGUFValueType.ARRAY:
            return self._array(name)
        return self._text(name) if kind is GGUFValueType.STRING else self._number(_SCALARS[kind], name)

    def _array(self, name: str) -> list[Any]:
        kind, count = self._value_type(name), self._count(f"elements of {name}", MAX_ELEMENTS)
        if kind is GGUFValueType.STRING:
            return [self._text(name) for _ in range(count)]
        if kind is GGUFValueType.ARRAY:
            raise self._wrong(f"has arrays of arrays in {name}")
        code = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(code, self._bytes(struct.calcsize(code), name)))

    def _tensor(self, name: str) -> TensorInfo:
        """Reads a tensor's description. Its start is still relative to that of the first tensor."""
        num_dims = self._number("I", name)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._wrong(f"has {num_dims} dimensions of tensor {name}, expected 1 to {MAX_DIMS}")
        shape = tuple(self._number("Q", name) for _ in range(num_dims))[::-1]
        number, start = self._number("I", name), self._number("Q", name)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self._wrong(f"has tensor {name} of type {number}, which ggml does not have") from None
        if 0 in shape or shape[-1] % GGML_QUANT_SIZES[kind][0]:
            raise self._wrong(f"has tensor {name} of shape {list(shape)}, which is not in whole blocks of {kind.name}")
        return TensorInfo(self._file, shape, kind.name, start)

    def _aligned(self, metadata: Mapping[str, Value]) -> int:
        """Returns the start of the first tensor."""
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._wrong(f"has general.alignment = {shown(alignment)}, which is not a power of two")
        return -(-self._at // alignment) * alignment

    def _check_places(self, tensors: Mapping[str, TensorInfo]) -> None:
        size = len(self._data)
        for name, tensor in tensors.items():
            if tensor.start + tensor.num_bytes > size:
                raise self._wrong(
                    f"has {size} bytes, and tensor {name} of {tensor.num_bytes} bytes begins at {tensor.start}"
                )
        for (name, first), (other, second) in pairwise(sorted(tensors.items(), key=lambda item: item[1].start)):
            if first.start + first.num_bytes > second.start:
                raise self._wrong(f"has tensors {name} and {other} in the same place, at {second.start}")

    def _value_type(self, name: str) -> GGUFValueType:
        number = self._number("I", name)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._wrong(f"has {name} of value type {number}, which GGUF does not have") from None

    def _count(self, what: str, limit: int) -> int:
        count = int(self._number("Q", what))
        if count > limit:
            raise self._wrong(f"has {count} {what}, more than the {limit} that are read")
        return count

    def _text(self, what: str) -> str:
        try:
            return self._bytes(self._number("Q", what), what).decode()
        except UnicodeDecodeError as error:
            raise self._wrong(f"has text in {what} that is not UTF-8: {error}") from None

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}"), what))[0]

    def _bytes(self, count: int, what: str) -> bytes:
        at, self._at = self._at, self._at + count
        if self._at > self._end:
            raise self._wrong(f"ends at byte {self._end}, inside of {shown(what)}, which has {count} bytes at {at}")
        return self._data[at : self._at]

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file.name} {what}")

"""Impossible GGUF files from strangers are refused by name, without taking time or memory."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from penstock.engine.errors import CheckpointError
from penstock.engine.loading.gguf.header import MAX_ELEMENTS, MAX_FIELDS, MAX_TENSORS, read_header

F32, Q4_K = 0, 12
U8, U32, STRING, ARRAY = 0, 4, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def field(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: Sequence[int], kind: int = F32, start: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


def file_of(
    fields: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_fields: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    """Makes a file that claims `num_fields` and `num_tensors`, by default the true numbers."""
    counts = struct.pack("<QQ", num_tensors or len(tensors), num_fields or len(fields))
    head = magic + struct.pack("<I", version) + counts + b"".join((*fields, *tensors))
    return head + bytes(-len(head) % 32)


ALL: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes, too few"),
    "magic": (file_of(magic=b"GGML"), "begins with b'GGML', not with b'GGUF'"),
    "version": (file_of(version=1), "is of GGUF version 1, expected 2 or 3"),
    "big-endian": (file_of(version=3 << 24), "is of GGUF version 50331648"),
    "fields": (file_of(num_fields=2**60), f"has {2**60} metadata fields, more than the {MAX_FIELDS}"),
    "tensors": (file_of(num_tensors=2**60), f"has {2**60} tensors, more than the {MAX_TENSORS}"),
    "missing fields": (file_of(num_fields=3), "ends at byte 32, inside of"),
    "key": (file_of([struct.pack("<Q", 2**62) + b"k"]), f"inside of 'the name of metadata 0', which has {2**62} bytes"),
    "long key": (file_of([field(b"k" * 300, U8, b"\1")]), "has a name of 300 characters"),
    "text": (file_of([field(b"k", STRING, struct.pack("<Q", 2**40))]), f"inside of 'k', which has {2**40} bytes"),
    "no UTF-8": (file_of([field(b"k", STRING, text(b"\xff"))]), "has text in k that is not UTF-8"),
    "value type": (file_of([field(b"k", 77, b"")]), "has k of value type 77"),
    "twice": (file_of([field(b"k", U8, b"\1")] * 2), "has metadata 'k' twice"),
    "array": (
        file_of([field(b"k", ARRAY, struct.pack("<IQ", U8, 2**60))]),
        f"has {2**60} elements of k, more than the {MAX_ELEMENTS}",
    ),
    "numbers": (
        file_of([field(b"k", ARRAY, struct.pack("<IQ", U32, 2**20))]),
        f"inside of 'k', which has {2**22} bytes",
    ),
    "texts": (file_of([field(b"k", ARRAY, struct.pack("<IQ", STRING, 2**20))]), "inside of 'k'"),
    "arrays": (file_of([field(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "has arrays of arrays in k"),
    "alignment": (
        file_of([field(b"general.alignment", U32, struct.pack("<I", 3))]),
        "general.alignment = 3, which is no",
    ),
    "dimensions": (file_of([], [tensor(b"t", [1] * 5)]), "has 5 dimensions of tensor t"),
    "no dimensions": (file_of([], [tensor(b"t", [])]), "has 0 dimensions of tensor t"),
    "no elements": (
        file_of([], [tensor(b"t", [0])]),
        r"has tensor t of shape \[0\], which is not in whole blocks of F32",
    ),
    "type": (file_of([], [tensor(b"t", [8], 99)]), "has tensor t of type 99, which ggml does not have"),
    "blocks": (
        file_of([], [tensor(b"t", [32, 2], Q4_K)]),
        r"has tensor t of shape \[2, 32\], which is not in whole blocks",
    ),
    "beyond": (file_of([], [tensor(b"t", [8], start=2**62)]), "tensor t of 32 bytes begins at"),
    "huge": (file_of([], [tensor(b"t", [2**63, 2**63])]), f"tensor t of {2**128} bytes begins at"),
    "truncated": (file_of([], [tensor(b"t", [8])]) + bytes(31), "tensor t of 32 bytes begins at"),
    "overlap": (
        file_of([], [tensor(b"t", [16]), tensor(b"s", [8], start=32)]) + bytes(64),
        "has tensors t and s in the same place",
    ),
    "same name": (file_of([], [tensor(b"t", [8])] * 2) + bytes(64), "has tensor 't' twice"),
}


@pytest.mark.parametrize("case", ALL)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, case: str) -> None:
    data, message = ALL[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message):
            read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is a FIFO, not a regular file"),
        (os.mkdir, "is a directory"),
        (lambda path: None, "is not readable"),
    ],
)
def test_what_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
    path = tmp_path / "model.gguf"
    make(path)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


def test_a_sound_file_is_read_to_its_end(tmp_path: Path) -> None:
    path, values = tmp_path / "model.gguf", np.arange(64, dtype=np.float32).reshape(2, 32)
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_uint64("a", 2**40)
    writer.add_float32("b", 0.5)
    writer.add_bool("c", True)
    writer.add_array("d", ["x", "é"])
    writer.add_array("e", [-1, 2])
    writer.add_tensor("t", values)
    writer.add_tensor("s", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    assert header.architecture == "llama"
    assert [header.metadata[key] for key in "abcde"] == [2**40, 0.5, True, ["x", "é"], [-1, 2]]
    found = header.tensors["t"]
    assert (found.shape, found.kind, found.num_bytes, found.start % 64) == ((2, 32), "F32", 256, 0)
    assert path.read_bytes()[found.start : found.start + 256] == values.tobytes()
    assert header.tensors["s"].shape == (32,)

"""Host memory for weights, which are read and copied in small pieces."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np

ALIGNMENT = 64  # bytes: a CPU device takes memory at a multiple of it without a copy
PIECE_BYTES = 2**22  # of a file that are read at once
LARGE_BYTES = 2**22  # from this size on, numpy too asks for huge pages
_COLUMNS = 16  # of a transposed array that are copied at once: so many rows of its memory stay in the first-level cache


def device_buffer(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns zeros that a CPU device need not copy.

    Large ones are mapped here: numpy asks for huge pages, and a virtual machine whose host has to find the memory first
    waits for those several times as long. They are moved once a model serves (`execution/huge_pages.py`).
    """
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size >= LARGE_BYTES:
        memory = np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        return memory.view(dtype).reshape(shape)
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def fill(array: np.ndarray, values: np.ndarray) -> None:
    """Sets all of `array`, whose rows or columns are contiguous. If values are transposed in one of the two, a few
    columns are copied at a time: numpy would fetch each line of them once for every element.
    """
    if array.ndim > 1 and array.strides[-1] > array.strides[-2]:
        array, values = array.swapaxes(-1, -2), values.swapaxes(-1, -2)
    if values.ndim < 2 or values.strides[-1] <= values.strides[-2]:
        array[...] = values
        return
    for start in range(0, values.shape[-1], _COLUMNS):
        columns = (..., slice(start, start + _COLUMNS))
        array[columns] = values[columns]


def pieces(part: slice, at_once: int) -> Iterator[tuple[slice, slice]]:
    """Cuts `part` into slices of at most `at_once`; yields each with its place in `part`."""
    for start in range(part.start, part.stop, at_once):
        stop = min(start + at_once, part.stop)
        yield slice(start, stop), slice(start - part.start, stop - part.start)

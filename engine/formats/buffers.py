"""Host memory for weights, which are read in small pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

ALIGNMENT = 64  # bytes: a CPU device takes memory at a multiple of it without a copy
PIECE_BYTES = 2**22  # of a file that are read at once


def device_buffer(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns zeros that a CPU device need not copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def pieces(part: slice, at_once: int) -> Iterator[tuple[slice, slice]]:
    """Cuts `part` into slices of at most `at_once`; yields each with its place in `part`."""
    for start in range(part.start, part.stop, at_once):
        stop = min(start + at_once, part.stop)
        yield slice(start, stop), slice(start - part.start, stop - part.start)

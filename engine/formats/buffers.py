"""Host memory that weights are read into, a little at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

ALIGNMENT = 64  # bytes: what begins at a multiple of it, a CPU device takes as it is, without a copy
PIECE_BYTES = 2**22  # of a file, read at once


def device_buffer(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Zeros that a CPU device need not copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def pieces(part: slice, at_once: int) -> Iterator[tuple[slice, slice]]:
    """`part` cut into slices of at most `at_once`, and where in `part` each of them is."""
    for start in range(part.start, part.stop, at_once):
        stop = min(start + at_once, part.stop)
        yield slice(start, stop), slice(start - part.start, stop - part.start)

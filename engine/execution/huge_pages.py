"""Moves a CPU's weights and KV cache to huge pages, which save the processor most walks through its page tables.

A step of few rows is as fast as the weights come from memory. With pages of 4 KiB, a machine reads them at two thirds
of the rate of 2 MiB pages. A virtual machine is slower still, because each walk goes through two tables there.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import jax

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MADV_HUGEPAGE = 14  # the kernel may do it when it has time
_MADV_COLLAPSE = 25  # the kernel does it now; Linux 6.1
_SMALLEST_BYTES = 1 << 18
_LARGEST_PAGE = 32 << 20  # some processors have huge pages larger than the arrays


class HugePages:
    """Moves arrays to huge pages in the background; their contents and addresses stay as they are.

    Nothing depends on it. If the kernel has no huge pages, or is set to give none, small pages stay.
    """

    def __init__(self) -> None:
        self._moving: list[Thread] = []

    def hold(self, arrays: Iterable[jax.Array]) -> None:
        """Begins to move arrays. They may be used, donated and deleted meanwhile: the kernel refuses old addresses."""
        size = _page_bytes()
        if not size:
            return
        pages = sorted({page for start, end in _places(arrays) for page in range(start // size * size, end, size)})
        if pages:
            thread = Thread(target=_move, args=(pages, size), name="huge-pages", daemon=True)
            with suppress(RuntimeError):  # no more threads can be started
                thread.start()
                self._moving.append(thread)

    def wait(self) -> None:
        """Waits until all have been moved, as timings while they move are not representative."""
        while self._moving:
            self._moving.pop().join()


def _page_bytes() -> int:
    """Returns the size of a huge page in bytes; 0 if there are none."""
    if sys.platform != "linux":
        return 0
    try:
        size = int((_SETTINGS / "hpage_pmd_size").read_text())
        is_allowed = "[never]" not in (_SETTINGS / "enabled").read_text()
    except (OSError, ValueError):
        return 0
    is_size = resource.getpagesize() <= size <= _LARGEST_PAGE and not size & (size - 1)
    return size if is_allowed and is_size else 0


def _places(arrays: Iterable[jax.Array]) -> Iterator[tuple[int, int]]:
    """Yields start and end addresses of CPU arrays. Arrays are adjacent: a page that two share is moved too."""
    for array in arrays:
        for shard in array.addressable_shards:
            if shard.device.platform == "cpu" and shard.data.nbytes >= _SMALLEST_BYTES:
                start = shard.data.unsafe_buffer_pointer()
                yield start, start + shard.data.nbytes


def _move(pages: list[int], size: int) -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for page in pages:
        if madvise(page, size, _MADV_COLLAPSE) != 0:
            madvise(page, size, _MADV_HUGEPAGE)

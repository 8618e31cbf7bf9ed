from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.engine.execution import huge_pages
from penstock.engine.execution.huge_pages import HugePages


def in_huge_pages(array: jax.Array) -> int:
    """Returns the bytes in huge pages of the memory areas that hold an array."""
    start = array.unsafe_buffer_pointer()
    end, is_own, held = start + array.nbytes, False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_own = int(area[1], 16) < end and start < int(area[2], 16)
        elif is_own and line.startswith("AnonHugePages:"):
            held += int(line.split()[1]) << 10
    return held


@pytest.mark.skipif(not huge_pages._page_bytes(), reason="the kernel has no huge pages, or is set to give none")
def test_arrays_are_moved_and_stay_what_they_are() -> None:
    array = jnp.arange(8 << 20, dtype=jnp.float32) + 1
    address = array.unsafe_buffer_pointer()
    pages = HugePages()
    pages.hold([array])
    pages.wait()
    if not in_huge_pages(array):
        pytest.skip("the kernel had none to give")
    assert in_huge_pages(array) >= 24 << 20  # of 32 MiB; its ends may share a page with other memory
    assert array.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(array, np.arange(8 << 20, dtype=np.float32) + 1)


def test_arrays_that_are_gone_are_left_alone() -> None:
    array = jnp.ones(1 << 20)
    pages = HugePages()
    pages.hold([array])
    array.delete()
    pages.hold([jnp.ones(1 << 20)])
    pages.wait()
    assert not pages._moving


@pytest.mark.parametrize(
    ("size", "enabled"),
    [
        ("2097152", "always madvise [never]"),
        ("536870912", "[always] madvise never"),
        ("", ""),
        ("-1", "[always]"),
        ("3", "[always]"),
        ("6291456", "[always]"),
        ("\0", "[always]"),
    ],
)
def test_no_thread_where_there_are_none_to_have(
    size: str, enabled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hpage_pmd_size").write_text(size)
    (tmp_path / "enabled").write_text(enabled)
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    pages = HugePages()
    pages.hold([jnp.ones(1 << 20)])
    assert not pages._moving


def test_no_thread_where_there_are_none_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(huge_pages, "_page_bytes", lambda: 2 << 20)
    monkeypatch.setattr("threading.Thread.start", refuse)
    pages = HugePages()
    pages.hold([jnp.ones(2 << 20)])
    pages.wait()

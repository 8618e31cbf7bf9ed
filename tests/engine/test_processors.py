"""Number of processors: those allowed, within the quota of a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.engine import processors
from penstock.engine.execution.kept_keys import processor_name
from penstock.engine.kernels.cpu import compilation, processor_kinds
from penstock.engine.processors import bound_xla, num_processors

V2, V1 = "0::/pods/one\n", "4:cpu,cpuacct:/pods/one\n3:memory:/pods/one\n"


@pytest.fixture(autouse=True)
def _sixteen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(processors, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(processors, "_OWN", tmp_path / "own")
    monkeypatch.setenv("PJRT_NPROC", "")
    monkeypatch.delenv("PJRT_NPROC")


def write(tmp_path: Path, own: str, files: dict[str, str]) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("", {}, 16),
        (V2, {}, 16),
        (V2, {"pods/one/cpu.max": "max 100000\n"}, 16),
        (V2, {"pods/one/cpu.max": "200000 100000\n"}, 2),
        (V2, {"pods/one/cpu.max": "150000 100000\n"}, 2),
        (V2, {"pods/one/cpu.max": "10000 100000\n"}, 1),
        (V2, {"pods/one/cpu.max": "max 100000\n", "pods/cpu.max": "400000 100000\n"}, 4),
        (V2, {"pods/one/cpu.max": "800000 100000", "cpu.max": "300000 100000"}, 3),
        (V2, {"pods/one/cpu.max": "9900000 100000\n"}, 16),
        (V2, {"pods/one/cpu.max": "junk"}, 16),
        (V2, {"pods/one/cpu.max": "100000 0"}, 16),
        (V2, {"pods/one/cpu.max": f"{10**400} 1"}, 16),
        (V2, {"pods/one/cpu.max": "\0\0"}, 16),
        ("junk\n\n:\n::\n0::/a\0b\n\ufffd", {}, 16),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        (V1, {"cpu/pods/one/cpu.cfs_quota_us": "300000", "cpu/pods/one/cpu.cfs_period_us": "100000"}, 3),
        (V1, {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),  # a container sees its own
        (V1, {"cpu/pods/one/cpu.cfs_quota_us": "-1", "cpu/pods/one/cpu.cfs_period_us": "100000"}, 16),
    ],
)
def test_the_smallest_of_all_bounds(own: str, files: dict[str, str], expected: int, tmp_path: Path) -> None:
    write(tmp_path, own, files)
    assert num_processors() == expected


@pytest.mark.parametrize("error", [PermissionError, AttributeError])
def test_who_may_not_ask_has_all_that_there_are(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> set[int]:
        raise error

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    assert num_processors() == (os.cpu_count() or 1)


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\0", b"flags\nmodel name\nflags"])
def test_of_a_processor_that_nobody_describes_nothing_is_assumed(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown processor has no features, and no figures, libraries or times for another machine."""
    monkeypatch.setattr(processors, "_CPUINFO", tmp_path / "cpuinfo")
    if content is not None:
        (tmp_path / "cpuinfo").write_bytes(content)
    assert processor_kinds.features() == frozenset()
    assert compilation._processor()
    assert processor_name()


def test_xla_is_bound_where_there_is_a_quota_and_nobody_said_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound_xla()
    assert "PJRT_NPROC" not in os.environ
    write(tmp_path, V2, {"pods/one/cpu.max": "200000 100000\n"})
    bound_xla()
    assert os.environ["PJRT_NPROC"] == "2"
    monkeypatch.setenv("PJRT_NPROC", "5")
    bound_xla()
    assert os.environ["PJRT_NPROC"] == "5"

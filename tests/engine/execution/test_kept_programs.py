"""What tests find compiled by earlier runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.engine import kept_files
from tests.support.kept_programs import kept_between_runs

pytestmark = pytest.mark.versions


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def a_run(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def test_a_run_finds_what_the_last_compiled_and_nothing_else(tmp_path: Path, kept: Path) -> None:
    first, second = a_run(tmp_path, "first"), a_run(tmp_path, "second")
    with kept_between_runs(first, kept):
        kept_files.keep(first / "a-program", b"a")
        kept_files.keep(first / "plans" / "b.json", b"b")
        kept_files.keep(first / "step_times" / "c.json", b"1 s")
    with kept_between_runs(second, kept):
        assert {path.name for path in second.iterdir()} == {"a-program", "plans"}
        assert kept_files.recall(second / "a-program") == b"a"
        assert kept_files.recall(second / "plans" / "b.json") == b"b"
    assert {path.name for path in kept.iterdir()} == {"a-program", "plans"}


def test_a_damaged_program_is_replaced(tmp_path: Path, kept: Path) -> None:
    first, second, third = (a_run(tmp_path, name) for name in ("first", "second", "third"))
    with kept_between_runs(first, kept):
        kept_files.keep(first / "a-program", b"a")
    (kept / "a-program").write_bytes(b"cut off")
    with kept_between_runs(second, kept):
        assert kept_files.recall(second / "a-program") is None
        kept_files.keep(second / "a-program", b"a")
    with kept_between_runs(third, kept):
        assert kept_files.recall(third / "a-program") == b"a"


def test_two_processes_of_one_run_share_a_folder(tmp_path: Path, kept: Path) -> None:
    run = a_run(tmp_path, "run")
    with kept_between_runs(run, kept):
        kept_files.keep(run / "a-program", b"a")
        with kept_between_runs(run, kept):
            kept_files.keep(run / "b-program", b"b")
    assert {path.name for path in kept.iterdir()} == {"a-program", "b-program"}


def test_the_oldest_make_room(tmp_path: Path, kept: Path) -> None:
    run = a_run(tmp_path, "run")
    with kept_between_runs(run, kept, max_bytes=250):
        for age, name in enumerate(("new", "middle", "old")):
            path = run / f"{name}-program"
            path.write_bytes(b"x" * 100)
            os.utime(path, (1000 - age, 1000 - age))
    assert {path.name for path in kept.iterdir()} == {"new-program", "middle-program"}

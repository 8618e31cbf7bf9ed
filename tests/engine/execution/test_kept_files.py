"""Files that we keep are whole, or treated as missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from penstock.engine import kept_files
from penstock.engine.execution.compilation import keep_compilations
from tests.engine.loading.harms import HARMS


@pytest.fixture
def compiled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Compiles a function as a new process does, with `tmp_path` or another folder as its cache, and counts how often
    it had to.
    """
    compiled = 0

    def count(*_: object, **__: object) -> None:
        nonlocal compiled
        compiled += 1

    names = (
        "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes", "jax_persistent_cache_enable_xla_caches",
    )  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setattr("jax._src.compiler._cache_write", _counting(count))

    def compile_once(folder: Path = tmp_path) -> int:
        nonlocal compiled
        compiled = 0
        assert keep_compilations(folder) is None
        reset_cache()
        assert int(jax.jit(lambda x: x * 3 + 1).lower(np.int32(1)).compile()(np.int32(2))) == 7
        return compiled

    yield compile_once
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def _counting(count: Callable[[], None]) -> Callable[..., None]:
    from jax._src import compiler

    write: Callable[..., None] = compiler._cache_write

    def counted(*args: object) -> None:
        count()
        write(*args)

    return counted


@pytest.mark.parametrize("harm", HARMS)
def test_a_harmed_program_is_compiled_again_and_kept_anew(
    harm: str, compiled_in: Callable[[], int], tmp_path: Path
) -> None:
    assert compiled_in() == 1
    assert compiled_in() == 0
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    HARMS[harm](entry)
    assert compiled_in() == 1
    assert len(entry.read_bytes()) == pytest.approx(len(whole), rel=0.1)
    assert compiled_in() == 0


@pytest.mark.versions
def test_programs_are_found_in_a_folder_that_was_moved(compiled_in: Callable[[Path], int], tmp_path: Path) -> None:
    assert compiled_in(tmp_path / "a") == 1
    (tmp_path / "a").rename(tmp_path / "b")
    assert compiled_in(tmp_path / "b") == 0


def test_without_its_folder_a_program_is_compiled_and_no_more(compiled_in: Callable[[], int], tmp_path: Path) -> None:
    assert compiled_in() == 1
    (entry,) = tmp_path.iterdir()
    entry.unlink()
    tmp_path.rmdir()
    tmp_path.write_text("no folder")
    assert "File exists" in (keep_compilations(tmp_path) or "")
    reset_cache()
    assert int(jax.jit(lambda x: x * 3 + 1).lower(np.int32(1)).compile()(np.int32(2))) == 7
    tmp_path.unlink()
    tmp_path.mkdir()


@pytest.mark.parametrize("harm", HARMS)
def test_what_was_harmed_is_not_recalled(harm: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    assert kept_files.recall(path) is None
    for data in (b"", b"some", bytes(range(256)) * 40):
        kept_files.keep(path, data)
        assert kept_files.recall(path) == data
        HARMS[harm](path)
        assert kept_files.recall(path) is None
        kept_files.keep(path, data)
        assert kept_files.recall(path) == data
        path.unlink()
    assert not [left for left in path.parent.iterdir() if left.is_file()]  # nothing that was half written


@pytest.mark.parametrize("harm", HARMS)
def test_what_was_installed_is_whole_or_installed_anew(harm: str, tmp_path: Path) -> None:
    path = tmp_path / "library"
    for harmed in (path, path.with_name("library.sha256")):
        for _ in range(2):
            (tmp_path / "new").write_bytes(b"some" * 100)
            kept_files.install(tmp_path / "new", path)
            assert kept_files.is_whole(path)
            assert path.read_bytes() == b"some" * 100
            HARMS[harm](harmed)
            if harmed is path:
                assert not kept_files.is_whole(path)


def test_why_a_folder_takes_nothing_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").touch()
    for name in ("a", "b", "deeper/c"):
        kept_files.keep_if_possible(tmp_path / "folder" / name, b"data")
    assert [line.getMessage().split(":")[0] for line in caplog.records] == ["compilations_not_kept"]
    kept_files.keep_if_possible(tmp_path / "other", b"data")
    assert kept_files.recall(tmp_path / "other") == b"data"

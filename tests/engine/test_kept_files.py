"""Files that we keep: whole, or as if they were not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from harms import HARMS
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from penstock.engine import kept_files
from penstock.engine.execution.compilation import keep_compilations


@pytest.fixture
def compiled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Compiles a function as a process that starts anew does, with `tmp_path` as its cache; how often it had to."""
    compiled = 0

    def count(*_: object, **__: object) -> None:
        nonlocal compiled
        compiled += 1

    names = (
        "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setattr("jax._src.compiler._cache_write", _counting(count))

    def compile_once() -> int:
        nonlocal compiled
        compiled = 0
        assert keep_compilations(tmp_path) is None
        reset_cache()
        assert int(jax.jit(lambda x: x * 3 + 1).lower(np.int32(1)).compile()(np.int32(2))) == 7
        return compiled

    yield compile_once
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def _counting(count: Callable[[], None]) -> Callable[..., None]:
    from jax._src import compiler

    write = compiler._cache_write

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
        path.unlink(missing_ok=True)
    assert list(path.parent.iterdir()) == []  # and nothing aside

"""The C++ kernels: built once, or a reason why not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.engine import ConfigError
from penstock.engine.native import NativeLibrary, NativeUnavailableError, load_library
from penstock.engine.native.compilation import SOURCES, build_here


@pytest.fixture(autouse=True)
def _nothing_was_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.native.shipping.SHIPPED_DIR", tmp_path / "shipped")


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_without_a_compiler_auto_does_without_and_native_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    library = NativeLibrary(tmp_path / "built")
    assert library.missing is None  # nobody has asked yet
    assert library.load_for("attention", "auto") is None
    assert library.missing == "there is no C++ compiler (c++, g++ or clang++) on PATH"
    with pytest.raises(ConfigError, match="matmul 'native' cannot be built: there is no C\\+\\+ compiler"):
        library.load_for("matmul", "native")
    assert not (tmp_path / "built").exists()


def test_a_compiler_that_fails_is_quoted_and_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "c++", f'echo called >> "{tmp_path}/calls"; echo "error: no such intrinsic" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    library = NativeLibrary(tmp_path / "built")
    assert [library.load_for(name, "auto") for name in ("attention", "matmul")] == [None, None]
    assert library.missing == f"{tmp_path}/c++ failed: error: no such intrinsic"
    assert 1 <= len((tmp_path / "calls").read_text().splitlines()) <= len(SOURCES)  # for one library
    assert list((tmp_path / "built").iterdir()) == []  # nothing half-made is left to be loaded


def test_a_compiler_that_cannot_be_run_is_a_reason_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c++").write_text("not a program")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailableError, match=r"c\+\+ could not be run: "):
        load_library(tmp_path / "built")


def test_the_library_is_built_once_per_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "c++", f'echo called >> "{tmp_path}/calls"; for last; do :; done; echo built > "$last"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    first = build_here(tmp_path / "built")
    assert first.read_text() == "built\n"
    assert build_here(tmp_path / "built") == first
    assert list((tmp_path / "built").iterdir()) == [first]
    assert len((tmp_path / "calls").read_text().splitlines()) == len(SOURCES) + 1  # and to link them
    monkeypatch.setattr("penstock.engine.native.compilation._processor", lambda: "another")
    assert build_here(tmp_path / "built") != first  # what was built for one processor does not run on another


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_a_process_loads_it_once_whatever_the_folder(tmp_path: Path) -> None:
    """XLA refuses a second kernel of the same name, as two models with different cache folders would bring it."""
    built = build_here(Path.home() / ".cache" / "penstock" / "native")
    other = tmp_path / built.name
    shutil.copy(built, other)
    assert load_library(built.parent) is load_library(tmp_path)

"""The C++ kernels are built once, or there is a reason why not."""

from __future__ import annotations

import ctypes
import shutil
import threading
from pathlib import Path

import pytest

from penstock.engine import ConfigError, kept_files
from penstock.engine.kernels.cpu import NativeLibrary, NativeUnavailableError, load_library
from penstock.engine.kernels.cpu.compilation import SOURCES, build_here
from tests.engine.loading.harms import HARMS


@pytest.fixture(autouse=True)
def _nothing_was_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.kernels.cpu.shipping.SHIPPED_DIR", tmp_path / "shipped")


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_without_a_compiler_auto_does_without_and_native_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    library = NativeLibrary(tmp_path / "built")
    before = library.missing
    assert library.load_for("attention", "auto") is None
    assert before is None  # nobody has asked yet
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
    told: list[tuple[int, int, str]] = []
    first = build_here(tmp_path / "built", lambda *now: told.append(now))
    assert first.read_text() == "built\n"
    assert build_here(tmp_path / "built", lambda *now: told.append(now)) == first
    assert told == [(0, 0, "c++ compiles the kernels for this processor, once; it may take minutes")]
    assert sorted((tmp_path / "built").iterdir()) == [first, first.with_name(f"{first.name}.sha256")]
    assert len((tmp_path / "calls").read_text().splitlines()) == len(SOURCES) + 1  # and to link them
    monkeypatch.setattr("penstock.engine.kernels.cpu.compilation._processor", lambda: "another")
    assert build_here(tmp_path / "built") != first  # a build for one processor does not run on another


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compiler of a library that says 7; each build adds a line to this file."""
    (tmp_path / "seven.cc").write_text('extern "C" int seven() { return 7; }')
    link = (
        f'echo built >> "{tmp_path}/builds"; exec {shutil.which("c++")} -shared -fPIC "{tmp_path}/seven.cc" -o "$last"'
    )
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "c++", f'for last; do :; done; case "$*" in *" -c "*) : > "$last";; *) {link};; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr("penstock.engine.kernels.cpu.library._register", lambda library: library)
    forget(monkeypatch)
    (tmp_path / "builds").touch()
    return tmp_path / "builds"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_loaded", "_found"):
        monkeypatch.setattr(f"penstock.engine.kernels.cpu.library.{name}", {})


def says_seven(build_dir: Path | None, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Checks whether the library that a newly started process finds says 7."""
    forget(monkeypatch)
    return bool(load_library(build_dir).seven() == 7)


@NEEDS_COMPILER
@pytest.mark.parametrize("suffix", ["", ".sha256"])
@pytest.mark.parametrize("harm", ["empty", "cut in half", "zeros at the end", "first byte", "a folder", "a pipe"])
def test_a_harmed_library_is_built_anew_before_it_is_mapped(
    harm: str, suffix: str, builds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert says_seven(tmp_path / "built", monkeypatch)
    (library,) = (tmp_path / "built").glob("*.so")
    HARMS[harm](library.with_name(library.name + suffix))
    assert says_seven(tmp_path / "built", monkeypatch)
    assert kept_files.is_whole(library)
    assert says_seven(tmp_path / "built", monkeypatch)
    assert len(builds.read_text().splitlines()) == 2


@NEEDS_COMPILER
def test_a_library_that_is_in_use_outlives_its_file(builds: Path, tmp_path: Path) -> None:
    library = load_library(tmp_path / "built")
    shutil.rmtree(tmp_path / "built")
    assert library.seven() == 7
    assert load_library(tmp_path / "built") is library
    assert len(builds.read_text().splitlines()) == 1


@NEEDS_COMPILER
def test_a_folder_that_cannot_be_written_to_or_run_from_is_done_without(
    builds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert says_seven(tmp_path / "file" / "native", monkeypatch)
    assert says_seven(None, monkeypatch)
    load = ctypes.CDLL
    noexec = tmp_path / "noexec"

    def refuse(path: str) -> ctypes.CDLL:
        if path.startswith(str(noexec)):
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr("ctypes.CDLL", refuse)
    assert says_seven(noexec, monkeypatch)
    monkeypatch.setattr("tempfile.tempdir", str(noexec))
    forget(monkeypatch)
    with pytest.raises(NativeUnavailableError, match="failed to map segment"):
        load_library(noexec)
    assert NativeLibrary(noexec).load_for("attention", "auto") is None
    with pytest.raises(ConfigError, match=r"matmul 'native' cannot be built: .*failed to map segment"):
        NativeLibrary(noexec).load_for("matmul", "native")


@NEEDS_COMPILER
def test_of_two_processes_one_builds(builds: Path, tmp_path: Path) -> None:
    threads = [threading.Thread(target=build_here, args=[tmp_path / "built"]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds.read_text().splitlines()) == 1


@NEEDS_COMPILER
def test_a_process_loads_it_once_whatever_the_folder(tmp_path: Path) -> None:
    """XLA refuses a second kernel of the same name, which two models with different cache folders would bring."""
    built = build_here(Path.home() / ".cache" / "penstock" / "native")
    other = tmp_path / built.name
    for suffix in ("", ".sha256"):
        shutil.copy(f"{built}{suffix}", f"{other}{suffix}")
    assert load_library(built.parent) is load_library(tmp_path)

"""Tests of `make release`: what it refuses, and the wheels that it makes. It is run whole by whoever releases."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from penstock import __version__
from tests.support.packages import ROOT


@pytest.fixture(scope="module")
def made() -> ModuleType:
    place = ROOT / "deploy/release/release.py"
    spec = importlib.util.spec_from_file_location("release", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["release"] = module
    spec.loader.exec_module(module)
    return module


def test_notes_are_the_section_of_the_version(made: ModuleType) -> None:
    changelog = "# Changes\n\n## Unreleased\n\nnew\n\n## 0.2.0 - 2027-01-01\n\n### Added\n\n- x\n\n## 0.1.0\n\n"
    assert made.notes_of(changelog, "Unreleased") == "new\n"
    assert made.notes_of(changelog, "0.2.0") == "### Added\n\n- x\n"
    for section in ("0.1.0", "0.3.0", "0.2"):
        with pytest.raises(made.CannotRelease, match=f"says nothing of {section}"):
            made.notes_of(changelog, section)


def test_the_changelog_has_notes_for_this_version(made: ModuleType) -> None:
    notes = made.notes_of((ROOT / "CHANGELOG.md").read_text(), __version__)
    assert notes.startswith("### Upgrade notes\n")
    assert "\n### Added\n" in notes


def test_a_wheel_with_files_added_installs_as_what_it_says(made: ModuleType, tmp_path: Path) -> None:
    pure, target = tmp_path / "x-1-py3-none-any.whl", tmp_path / "x-1-py3-none-manylinux_2_35_x86_64.whl"
    with zipfile.ZipFile(pure, "w") as wheel:
        wheel.writestr("x/__init__.py", "")
        wheel.writestr("x-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("x-1.dist-info/RECORD", "x/__init__.py,,\n")
    made.add_files(pure, target, "py3-none-manylinux_2_35_x86_64", {"x/kernels.so": b"code"})
    with zipfile.ZipFile(target) as wheel:
        assert wheel.read("x/kernels.so") == b"code"
        tags = wheel.read("x-1.dist-info/WHEEL").decode().splitlines()[1:]
        assert tags == ["Root-Is-Purelib: false", "Tag: py3-none-manylinux_2_35_x86_64"]
        rows = wheel.read("x-1.dist-info/RECORD").decode().splitlines()
    assert [row.split(",")[0] for row in rows] == wheel.namelist()
    assert rows[2].startswith("x/kernels.so,sha256=")
    assert rows[2].endswith(",4")


def test_the_tag_is_of_the_newest_symbol_that_is_needed(made: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "_output", lambda *command: "GLIBC_2.2.5 GLIBCXX_3.4.99 GLIBC_2.35 GLIBC_PRIVATE")
    assert made.glibc_of([]) == (2, 17)
    assert made.glibc_of([Path("x.so")]) == (2, 35)


@pytest.mark.slow
def test_kernels_of_another_machine_are_loaded_in_an_emulator(made: ModuleType, tmp_path: Path) -> None:
    compiler, emulator = made.compiler_for("aarch64"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("NOT CHECKED, there is no compiler or emulator: apt install g++-aarch64-linux-gnu qemu-user")
    wheel, library = tmp_path / "x-1-py3-none-any.whl", tmp_path / "kernels.so"
    for code, problem in (("int there() { return 0; }", None), ("int gone(); int f() { return gone(); }", "gone")):
        (tmp_path / "x.cc").write_text(code)
        command = [compiler, "-shared", "-fPIC", str(tmp_path / "x.cc"), "-o", str(library)]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(wheel, "w") as made_wheel:
            made_wheel.write(library, f"{made.SHIPPED}/kernels-x.so")
        if problem is None:
            assert made.load_emulated(wheel, "aarch64", compiler, emulator) == 1
        else:
            with pytest.raises(made.CannotRelease, match=problem):
                made.load_emulated(wheel, "aarch64", compiler, emulator)


def test_a_tree_with_changes_is_no_release(made: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(made, "_output", lambda *command: " M README.md\n")
    with pytest.raises(made.CannotRelease, match="changes that are not committed"):
        next(made.release(tmp_path / "dist", ["x86_64"], rehearse=False))
    assert not (tmp_path / "dist").exists()


def test_a_commit_is_built_while_the_tree_changes(
    made: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@localhost", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(made._output, "__kwdefaults__", {"cwd": tmp_path, "environment": None})
    git("init")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("committed")
    (tmp_path / "link").symlink_to("folder")
    git("add", ".")
    git("commit", "--message", "all")
    (tmp_path / "folder" / "file").write_text("changed")
    (tmp_path / "new").touch()
    with made.exported("HEAD") as source:
        (tmp_path / "folder" / "file").write_text("changed again")
        assert (source / "link" / "file").read_text() == "committed"
        assert sorted(path.name for path in source.iterdir()) == ["folder", "link"]
    assert not source.exists()

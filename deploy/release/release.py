"""Makes what a release consists of in `dist/`: `make release` runs it. It ends before anything is uploaded.

All is made from the files of the commit that is checked out when it begins; the tree may change meanwhile.

- An sdist, a wheel for any machine, and for each type of machine that a compiler here makes code for a wheel with the
  CPU kernels inside. Its tag is that of the oldest glibc that has every symbol they need.
- `notes.md`, from the changelog, and an annotated tag of the commit.

Wheels are checked: by twine, by an import beside nothing but what they need and, for this type of machine, by loading
the kernels where no compiler is; for another, by loading them in qemu where that is installed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from penstock.engine.kernels.cpu.processor_kinds import TARGETS
from penstock.installed import DISTRIBUTION

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
SHIPPED = "penstock/engine/kernels/cpu/shipped"

_VERSION = "import penstock; print(penstock.__version__)"
_BUILD = """
import pathlib, sys
from penstock.engine.kernels.cpu.shipping import build_all
for library in build_all(pathlib.Path(sys.argv[1]), *sys.argv[2:]):
    print(library)
"""
_LOAD = "from penstock.engine.kernels.cpu import load_library, shipped_library as s; assert s(); load_library(None)"
_LOADER = """
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char** paths) {
  for (int at = 1; at < count; ++at) {
    if (dlopen(paths[at], RTLD_NOW) == nullptr) return fprintf(stderr, "%s\\n", dlerror()), 1;
  }
}
"""


class CannotRelease(Exception):
    """The message says what is missing or wrong."""


def release(dist: Path, machines: Sequence[str], *, rehearse: bool) -> Iterator[str]:
    """Makes everything, and yields what was done, a line each.

    Args:
        dist: an empty or missing folder.
        machines: types of machines in `TARGETS` whose wheels are wanted.
        rehearse: takes the notes of the next version if there are some; makes no tag.

    Raises:
        CannotRelease: the tree is not that of a release, or a check failed.
    """
    if changes := _output("git", "status", "--porcelain").splitlines():
        if not rehearse:
            raise CannotRelease("the tree has changes that are not committed")
        yield f"left out: what is not committed, in {len(changes)} files"
    commit = _output("git", "rev-parse", "HEAD").strip()
    with exported(commit) as source:
        version = _output(sys.executable, "-c", _VERSION, cwd=source, environment=_importing(source)).strip()
        yield f"version {version} from commit {commit[:12]}"
        yield from _made(source, version, dist, machines, rehearse=rehearse)
    if not rehearse:
        _output("git", "tag", "--annotate", "--message", f"Penstock {version}", f"v{version}", commit)
        yield f"tagged v{version}; push the tag, and upload dist/*.whl and dist/*.tar.gz with twine"


@contextmanager
def exported(commit: str) -> Iterator[Path]:
    """Yields a folder with the files of a commit, which no change to the tree reaches."""
    with tempfile.TemporaryDirectory(prefix="penstock-release-") as folder:
        archive, source = Path(folder, "source.tar"), Path(folder, "source")
        _output("git", "archive", "--output", str(archive), commit)
        shutil.unpack_archive(archive, source, filter="data")
        yield source


def _made(source: Path, version: str, dist: Path, machines: Sequence[str], *, rehearse: bool) -> Iterator[str]:
    """Builds and checks everything from the files in `source`, and yields what was done."""
    changelog = (source / "CHANGELOG.md").read_text()
    notes = notes_of(changelog, "Unreleased" if rehearse and "\n## Unreleased" in changelog else version)
    if dist.exists():
        shutil.rmtree(dist)
    dist.mkdir(parents=True)
    for kind in ("sdist", "wheel"):
        yield f"built {_built(kind, source, dist)}"
    (pure,) = dist.glob("*.whl")
    for machine in machines:
        compiler = compiler_for(machine)
        if compiler is None:
            yield f"no wheel for {machine}: there is no {machine}-linux-gnu-g++"
            continue
        wheel = _with_kernels(pure, source, machine, compiler)
        yield f"built {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB"
        if machine == platform.machine():
            yield f"checked {wheel.name}: kernels load without a compiler under {_tried(wheel)}"
        elif (emulator := shutil.which(f"qemu-{machine}")) is None:
            yield f"not tried: {wheel.name}, as there is no qemu-{machine}"
        else:
            num_loaded = load_emulated(wheel, machine, compiler, emulator)
            yield f"checked {wheel.name}: its {num_loaded} libraries load in qemu"
    yield from _checked(source, version, dist)
    (dist / "notes.md").write_text(notes)
    yield f"wrote notes.md: {len(notes.splitlines())} lines"


def notes_of(changelog: str, section: str) -> str:
    """Returns the text of a section of the changelog, whose heading may end with a date.

    Raises:
        CannotRelease: there is none, or it is empty.
    """
    found = re.search(
        rf"^## \[?{re.escape(section)}(?![\w.])[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    if found is None or not found[1].strip():
        raise CannotRelease(f"CHANGELOG.md says nothing of {section}: give `## Unreleased` this name")
    return found[1].strip() + "\n"


def compiler_for(machine: str) -> str | None:
    """Returns the name of a compiler for a type of machine, if one is here."""
    names = [f"{machine}-linux-gnu-g++", *(["c++", "g++"] if machine == platform.machine() else [])]
    return next((name for name in names if shutil.which(name)), None)


def glibc_of(libraries: Iterable[Path]) -> tuple[int, int]:
    """Returns the version of the oldest glibc that has all symbols which these libraries need."""
    needed = {(2, 17)}  # the oldest that pip knows
    for library in libraries:
        found = re.findall(r"\bGLIBC_(\d+)\.(\d+)", _output("readelf", "--version-info", "--wide", str(library)))
        needed |= {(int(major), int(minor)) for major, minor in found}
    return max(needed)


def add_files(wheel: Path, target: Path, tag: str, files: dict[str, bytes]) -> None:
    """Writes a wheel with further files under another tag."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as made:
        contents = {name: source.read(name) for name in source.namelist()}
        (info,) = (name for name in contents if name.endswith(".dist-info/WHEEL"))
        record = info.replace("/WHEEL", "/RECORD")
        del contents[record]
        text = contents[info].decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        contents[info] = re.sub(r"^Tag: .*$", f"Tag: {tag}", text, flags=re.MULTILINE).encode()
        contents |= files
        for name, content in contents.items():
            made.writestr(name, content)
        rows = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in contents.items()]
        made.writestr(record, "\n".join([*rows, f"{record},,", ""]))


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _importing(source: Path) -> dict[str, str]:
    """Returns an environment in which Python imports `penstock` from `source`, not from the tree."""
    return {**os.environ, "PYTHONPATH": str(source)}


def _built(kind: str, source: Path, dist: Path) -> str:
    code = f"from hatchling.build import build_{kind}; print(build_{kind}({str(dist)!r}))"
    return _output(sys.executable, "-c", code, cwd=source).split()[-1]


def _with_kernels(pure: Path, source: Path, machine: str, compiler: str) -> Path:
    with tempfile.TemporaryDirectory(prefix="penstock-release-") as folder:
        building = (sys.executable, "-c", _BUILD, folder, machine, compiler)
        libraries = [Path(line) for line in _output(*building, environment=_importing(source), cwd=source).split()]
        tag = "py3-none-manylinux_{}_{}_{}".format(*glibc_of(libraries), machine)
        target = pure.with_name(pure.name.replace("py3-none-any", tag))
        files = {f"{SHIPPED}/{file.name}": file.read_bytes() for file in Path(folder).glob("*.so*")}
        add_files(pure, target, tag, files)
    return target


def _tried(wheel: Path) -> str:
    """Loads the kernels from the wheel with the packages of this environment, where no compiler can be found."""
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        environment = {"PATH": folder, "PYTHONPATH": folder, "HOME": folder, "JAX_PLATFORMS": "cpu"}
        _output(sys.executable, "-c", _LOAD, cwd=Path(folder), environment=environment)
    return f"Python {platform.python_version()}"


def load_emulated(wheel: Path, machine: str, compiler: str, emulator: str) -> int:
    """Loads the kernels of a wheel for another type of machine, all symbols resolved, and returns how many there are.

    Raises:
        CannotRelease: there are none, or one can't be loaded.
    """
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        libraries = sorted(map(str, Path(folder, SHIPPED).glob("*.so")))
        if not libraries:
            raise CannotRelease(f"{wheel.name} has no kernels")
        source, loader = Path(folder, "loader.cc"), str(Path(folder, "loader"))
        source.write_text(_LOADER)
        _output(compiler, str(source), "-o", loader, "-ldl")
        _output(emulator, "-cpu", "max", "-L", f"/usr/{machine}-linux-gnu", loader, *libraries)
        return len(libraries)


def _checked(source: Path, version: str, dist: Path) -> Iterator[str]:
    files = sorted(map(str, [*dist.glob("*.whl"), *dist.glob("*.tar.gz")]))
    _output(str(Path(os.environ.get("TWINE", "twine"))), "check", "--strict", *files)
    yield f"twine finds nothing wrong with {len(files)} files"
    (wheel, *_) = sorted(dist.glob(f"*{platform.machine()}.whl")) or sorted(dist.glob("*.whl"))
    for number in PYTHONS:
        python = _python(number)
        if python is None:
            yield f"not tried on Python {number}: it is not here"
            continue
        with tempfile.TemporaryDirectory() as folder:
            _output(python, "-m", "venv", folder)
            constraints = source / "constraints" / f"py{number.replace('.', '')}.txt"
            bare = f"{folder}/bin"
            _output(f"{bare}/pip", "install", "--quiet", "--constraint", str(constraints), str(wheel), cwd=Path(folder))
            said = _output(f"{bare}/python", "-c", _VERSION, cwd=Path(folder))
            if said.strip() != version or _output(f"{bare}/penstock", "version").strip() != version:
                raise CannotRelease(f"{wheel.name} on Python {number} is version {said.strip()}, not {version}")
        yield f"{wheel.name} can be imported on Python {number} with what it needs and nothing else"


def _python(version: str) -> str | None:
    """Returns a Python that runs: the shim of a version manager may fail."""
    path = shutil.which(f"python{version}")
    if path is None:
        return None
    tried = subprocess.run([path, "-c", "import venv"], capture_output=True, check=False)  # noqa: S603
    return path if tried.returncode == 0 else None


def _output(*command: str, cwd: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    result = subprocess.run(  # noqa: S603  programs named here
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise CannotRelease(f"{' '.join(command[:4])} failed: {(result.stderr or result.stdout).strip()[-2000:]}")
    return result.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where everything goes; emptied first")
    parser.add_argument("--machine", action="append", choices=sorted(TARGETS), help="by default all")
    parser.add_argument("--rehearse", action="store_true", help="with the notes so far, without a tag")
    arguments = parser.parse_args()
    try:
        machines = arguments.machine or sorted(TARGETS)
        for line in release(arguments.dist.absolute(), machines, rehearse=arguments.rehearse):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    except CannotRelease as error:
        sys.exit(f"{DISTRIBUTION}: {error}")


if __name__ == "__main__":
    main()

"""The build is one package with a light client; its constraints are exact and name no place to fetch from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import penstock
from penstock.installed import DISTRIBUTION, refuse_shadowed
from tests.support.packages import PACKAGES, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = sorted((ROOT / "constraints").glob("py*.txt"))
IMAGES = sorted((ROOT / "constraints").glob("image-*.txt"))
DOCKERFILE = (ROOT / "Dockerfile").read_text()
STEM = f"{DISTRIBUTION.replace('-', '_')}-{penstock.__version__}"
PACKED = {".py", ".typed", ".cc", ".h", ".json", ".jsonl", ".jinja", ".lua", ".safetensors", ".html", ".css", ".mjs"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", ROOT, tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> tarfile.TarFile:
    return tarfile.open(build("sdist", ROOT, tmp_path_factory.mktemp("sdist")))


def build(kind: str, tree: Path, folder: Path) -> Path:
    """Builds a `wheel` or an `sdist` into `folder`, with the backend that is installed: no network."""
    code = f"from hatchling.build import build_{kind}; print(build_{kind}({str(folder)!r}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return folder / result.stdout.split()[-1]


def checksums(wheel: zipfile.ZipFile) -> dict[str, int]:
    return {file.filename: file.CRC for file in wheel.infolist()}


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"penstock", f"{STEM}.dist-info"}
    assert "penstock/py.typed" in names
    assert {Path(name).suffix for name in names if name.startswith("penstock/")} == PACKED


def test_the_sdist_holds_the_same_package_and_what_builds_it(wheel: zipfile.ZipFile, sdist: tarfile.TarFile) -> None:
    """Links of the tree are real files in the sdist; a file with two paths is under `penstock/`."""
    assert all(member.isfile() for member in sdist)
    names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {name for name in names if name.startswith("penstock/")} == {
        name for name in wheel.namelist() if name.startswith("penstock/")
    }
    assert {name.split("/")[0] for name in names} == {
        "penstock", "constraints", "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", ".gitignore", "PKG-INFO",
    }  # fmt: skip


def test_the_wheel_of_the_sdist_is_that_of_the_tree(
    wheel: zipfile.ZipFile, sdist: tarfile.TarFile, tmp_path: Path
) -> None:
    sdist.extractall(tmp_path, filter="data")
    built = build("wheel", tmp_path / STEM, tmp_path)
    assert checksums(zipfile.ZipFile(built)) == checksums(wheel)


def test_the_wheel_of_the_image_is_that_of_the_tree(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    copied = copy_as_the_dockerfile_does(tmp_path / "src")
    let_through = re.findall(r"^!(.*?)/?$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(let_through)
    assert checksums(zipfile.ZipFile(build("wheel", tmp_path / "src", tmp_path))) == checksums(wheel)


def copy_as_the_dockerfile_does(folder: Path) -> set[str]:
    """Copies what the Dockerfile's first stage does, links as links; returns the top-level names that it copies."""
    lines = [line.split() for line in re.findall(r"^COPY ((?!--from).*)$", DOCKERFILE, re.MULTILINE)]
    for source, target in [(ROOT / source, folder / target) for *sources, target in lines for source in sources]:
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return {source.split("/")[0] for *sources, _ in lines for source in sources}


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    wheel.extractall(folder)
    return folder


def python_beside_the_users_files(folder: Path, installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in `folder` with a `worker.py`, a `producer.py`, an `engine/` and the command as installers write it.

    The three come before what is installed; each leaves a mark when it is imported, in case its error is caught.
    """
    users_own = f"open({str(folder / 'imported')!r}, 'w').close()\nraise RuntimeError('this is a file of the user')\n"
    (folder / "engine").mkdir()
    for name in ("worker.py", "producer.py", "engine/__init__.py"):
        (folder / name).write_text(users_own)
    entry_points = next(installed.glob("*.dist-info/entry_points.txt")).read_text()
    module, function = re.findall(r"^penstock = (.+):(.+)$", entry_points, re.MULTILINE)[0]
    (folder / "command").write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    "code", ["from penstock import Client", "import penstock.engine", "import penstock.worker.service"]
)
def test_a_script_beside_files_named_as_its_parts_imports_it(installed: Path, tmp_path: Path, code: str) -> None:
    told = "\nimport sys; print(sys.modules['penstock'].__file__)"
    result = python_beside_the_users_files(tmp_path, installed, "-c", code + told)
    assert (result.returncode, result.stdout) == (0, f"{installed}/penstock/__init__.py\n"), result.stderr
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("program", [("-m", "penstock"), ("command",)], ids=["module", "command"])
@pytest.mark.parametrize(("argument", "shown"), [("--help", "Usage: penstock"), ("version", penstock.__version__)])
def test_the_command_runs_beside_files_named_as_its_parts(
    installed: Path, tmp_path: Path, program: tuple[str, ...], argument: str, shown: str
) -> None:
    result = python_beside_the_users_files(tmp_path, installed, *program, argument)
    assert result.returncode == 0, result.stderr
    assert shown in result.stdout
    assert not (tmp_path / "imported").exists()


def test_every_part_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    """The sdist has the same files."""
    for part in PACKAGES:
        sources = {f"penstock/{path.relative_to(ROOT)}" for path in (ROOT / part).rglob("*.py")}
        assert sources
        assert sources == {name for name in wheel.namelist() if re.match(rf"penstock/{part}/.*\.py$", name)}


def test_the_wheel_holds_the_demo_model_but_not_its_training(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if name.startswith("penstock/engine/demo/")}
    files = {f"penstock/engine/demo/model/{file.name}" for file in (ROOT / "engine/demo/model").iterdir()}
    assert packed == files | {"penstock/engine/demo/__init__.py"}
    assert wheel.getinfo("penstock/engine/demo/model/model.safetensors").file_size <= 8_000_000


def test_nothing_in_the_wheel_is_for_development(wheel: zipfile.ZipFile) -> None:
    """Users who install the wheel have neither the repository nor the packages of the `dev` extra."""
    code = "\n".join(wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".py"))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", code, re.MULTILINE))
    assert {"jax", "redis", "penstock"} <= imported
    assert imported & {"optax", "torch", "pytest", "hypothesis", "examples", "tests", "benchmarks"} == set()


def test_no_page_hint_or_recipe_names_another_distribution() -> None:
    """`pip install penstock` would fetch another project."""
    assert PROJECT["name"] == DISTRIBUTION
    texts = {
        file: file.read_text(errors="replace")
        for pattern in ("*.md", "Dockerfile", "Makefile", "docs/**/*", "examples/**/*", "deploy/**/*")
        for file in ROOT.glob(pattern) if file.is_file()
    }  # fmt: skip
    texts |= {file: file.read_text() for part in PACKAGES for file in (ROOT / part).rglob("*.py")}
    installs = re.compile(r"""pip3? install[^\n#`]*?['"\s]penstock(?=['"\[\s`,;)]|$)|['"`]penstock\[""", re.MULTILINE)
    assert [str(file) for file, text in texts.items() if installs.search(text)] == []
    assert installs.search("pip install --upgrade penstock")
    assert installs.search("pip install 'penstock[worker]'")


def test_beside_the_other_penstock_it_does_not_start(tmp_path: Path) -> None:
    refuse_shadowed(tmp_path)
    (tmp_path / f"{STEM}.dist-info").mkdir()
    refuse_shadowed(tmp_path)
    (tmp_path / "penstock-0.1.0.dist-info").mkdir()
    with pytest.raises(ImportError, match=r"^penstock-0\.1\.0 is installed in .*, and overwrites its files"):
        refuse_shadowed(tmp_path)


def test_metadata(wheel: zipfile.ZipFile) -> None:
    folder = f"{STEM}.dist-info"
    metadata = HeaderParser().parsestr(wheel.read(f"{folder}/METADATA").decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()
    assert {"worker", "gateway", "tpu", "cuda", "dev"} <= set(metadata.get_all("Provides-Extra", []))
    assert "penstock = penstock.cli:main" in wheel.read(f"{folder}/entry_points.txt").decode()


def test_the_client_needs_only_light_packages() -> None:
    names = {re.split(r"[\[<>= ]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names == {"pydantic", "redis", "structlog", "typer", "rich"}


HEAVY = ("jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers", "safetensors", "torch")
SERVERS = ("uvicorn", "starlette", "httptools", "python_multipart")


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("penstock", (*HEAVY, *SERVERS)),
        ("penstock.cli", (*HEAVY, *SERVERS)),
        ("penstock.gateway.app", (*HEAVY, "jinja2")),
    ],
)
def test_importing_it_loads_nothing_heavy(
    module: str, heavy: tuple[str, ...], wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """The wheel's own files are imported in a fresh interpreter, with the heavy packages out of reach."""
    wheel.extractall(tmp_path)
    code = f"""
import sys
for name in {heavy}: sys.modules[name] = None
import {module}
assert {module}.__file__.startswith({str(tmp_path)!r}), {module}.__file__
print("penstock.engine.engine" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "False\n"), result.stderr


def test_there_are_constraints_for_every_declared_python() -> None:
    declared = {text.split(" :: ")[-1] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)}
    assert {f"3.{path.stem.removeprefix('py3')}" for path in CONSTRAINTS} == declared


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_are_exact_and_name_no_place(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", line)] == []
    pinned = {line.split("==")[0] for line in lines}
    everything = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    needed = {re.split(r"[\[<>=; ]", requirement)[0].lower() for requirement in everything}
    assert needed - pinned == {"torch"}


@pytest.mark.parametrize("path", [*CONSTRAINTS, *IMAGES], ids=lambda path: path.stem)
def test_each_pin_is_within_what_is_declared(path: Path) -> None:
    pinned = dict(re.findall(r"^([a-z0-9-]+)==([0-9][\w.]*)", path.read_text(), re.MULTILINE))
    everything = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    for requirement in map(Requirement, everything):
        version = pinned.get(requirement.name.lower())
        assert version is None or version in requirement.specifier, f"{requirement}, pinned {version}"


def test_the_cuda_extra_stays_below_a_jax_that_may_lack_triton() -> None:
    (jax,) = map(Requirement, PROJECT["optional-dependencies"]["cuda"])
    assert any(each.operator == "<" for each in jax.specifier)

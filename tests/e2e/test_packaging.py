"""What is built and installed: one wheel, a light client, pinned and without a place to fetch from."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = sorted((ROOT / "constraints").glob("py*.txt"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this tree, built with the backend that is installed: no network."""
    folder = tmp_path_factory.mktemp("wheel")
    build = f"from hatchling.build import build_wheel; print(build_wheel({str(folder)!r}))"
    result = subprocess.run([sys.executable, "-c", build], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return zipfile.ZipFile(folder / result.stdout.split()[-1])


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"penstock", f"penstock-{penstock.__version__}.dist-info"}
    assert "penstock/py.typed" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_wheel_holds_the_demo_model_but_not_its_training(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if name.startswith("penstock/engine/demo/")}
    files = {f"penstock/engine/demo/model/{file.name}" for file in (ROOT / "engine/demo/model").iterdir()}
    assert packed == files | {"penstock/engine/demo/__init__.py"}
    assert wheel.getinfo("penstock/engine/demo/model/model.safetensors").file_size <= 8_000_000


def test_nothing_in_the_wheel_is_for_development(wheel: zipfile.ZipFile) -> None:
    """Who installs it has neither the repository nor the packages of the `dev` extra."""
    code = "\n".join(wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".py"))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", code, re.MULTILINE))
    assert {"jax", "redis", "penstock"} <= imported
    assert imported & {"optax", "torch", "pytest", "hypothesis", "examples", "tests", "benchmarks"} == set()


def test_metadata(wheel: zipfile.ZipFile) -> None:
    folder = f"penstock-{penstock.__version__}.dist-info"
    metadata = HeaderParser().parsestr(wheel.read(f"{folder}/METADATA").decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()
    assert {"worker", "tpu", "cuda", "dev"} <= set(metadata.get_all("Provides-Extra", []))
    assert "penstock = penstock.worker.cli:main" in wheel.read(f"{folder}/entry_points.txt").decode()


def test_the_client_needs_only_light_packages() -> None:
    names = {re.split(r"[\[<>= ]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names == {"pydantic", "pydantic-settings", "redis", "structlog", "typer", "rich"}


@pytest.mark.parametrize("module", ["penstock", "penstock.worker.cli"])
def test_importing_the_client_loads_nothing_heavy(module: str, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """From the wheel's own files, in a fresh interpreter, with the heavy packages out of reach."""
    wheel.extractall(tmp_path)
    heavy = ("jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers", "safetensors", "torch", "uvicorn")
    code = f"""
import sys
for name in {heavy}: sys.modules[name] = None
import {module}
assert {module}.__file__.startswith({str(tmp_path)!r}), {module}.__file__
print(sorted(name for name in sys.modules if name.startswith("penstock.engine")))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


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

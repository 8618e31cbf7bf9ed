"""docs/architecture.svg is what docs/scripts/architecture.py draws, and what the script declares is true."""

from __future__ import annotations

import ast
import re
import tomllib
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from docs.scripts import architecture
from docs.scripts.architecture import KEYS, PACKAGES, Package
from docs.scripts.pages import ROOT, page
from tests.support import packages

SVG = "{http://www.w3.org/2000/svg}"
NAMES = [package.name for package in PACKAGES]
CONTRACTS: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]


def test_the_file_is_what_the_script_draws() -> None:
    assert (ROOT / "docs" / "architecture.svg").read_text() == architecture.drawing(), "make docs"


def test_every_package_is_drawn() -> None:
    assert tuple(sorted(NAMES)) == packages.PACKAGES


@pytest.mark.parametrize("package", PACKAGES, ids=NAMES)
def test_every_folder_is_drawn(package: Package) -> None:
    there = {path.parent.name for path in (ROOT / package.name).glob("*/__init__.py")}
    assert {name for name, _ in package.folders} == there


def test_imports_go_down_as_the_contract_has_it() -> None:
    (floors,) = (each["layers"] for each in CONTRACTS if each["name"] == "imports go down only")
    height = {name: -number for number, floor in enumerate(floors) for name in floor.split(" | ")}
    for package in PACKAGES:
        assert all(height[target] < height[package.name] for target in package.imports)


@pytest.mark.parametrize("package", PACKAGES, ids=NAMES)
def test_imports_are_those_of_the_modules(package: Package) -> None:
    assert imported(package.name) - {package.name} == set(package.imports)


def imported(source: str) -> set[str]:
    """Returns the packages that the modules of one package import from, wherever the imports stand."""
    found: set[str] = set()
    for path in (ROOT / source).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found |= {module.split(".")[1] for module in modules if module.startswith("penstock.")}
    return found & set(NAMES)


def test_keys_are_those_of_the_wire() -> None:
    told = {code for row in page("docs/wire.md").table("Keys") for code in row[0].codes}
    assert {key.name for key in KEYS} <= told


def test_every_text_is_inside_its_box() -> None:
    """Characters count as wide as they may be, as readers' fonts differ."""
    where = architecture.places()
    for package in PACKAGES:
        place = where[package.name]
        assert place.height >= architecture.box_height(package)
        assert 12 + len(architecture.imports_of(package)) * architecture.SANS_WIDTH <= place.width
        for folder, what in package.folders:
            assert (len(folder) + 1) * architecture.MONO_WIDTH <= architecture.NAME_COLUMN
            assert 12 + architecture.NAME_COLUMN + len(what) * architecture.SANS_WIDTH <= place.width
    for key in KEYS:
        assert 12 + len(key.name) * architecture.MONO_WIDTH <= architecture.REDIS_WIDTH
        assert 12 + len(key.what) * architecture.SANS_WIDTH <= architecture.REDIS_WIDTH
        for touch in (key.client, key.worker):
            assert touch is None or len(touch[1]) * architecture.SANS_WIDTH <= architecture.GAP
    drawn = ET.fromstring(architecture.drawing())
    height = float(drawn.attrib["viewBox"].split()[3])
    lowest = max(float(text.attrib["y"]) for text in drawn.iter(f"{SVG}text"))
    assert lowest < height


def test_it_is_legible_in_light_and_dark() -> None:
    """Every colour of text has enough contrast with its background, by WCAG 2."""
    style = ET.fromstring(architecture.drawing()).find(f"{SVG}style")
    assert style is not None
    light, dark = re.findall(r"svg \{([^}]*)\}", style.text or "")
    for variables in (light, dark):
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", variables))
        for ink in ("ink", "faint"):
            for ground in ("paper", "box", "redis"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
        for ink, ground in (("flow", "paper"), ("import", "box")):
            assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)


def contrast(one: str, other: str) -> float:
    lower, higher = sorted((luminance(one), luminance(other)))
    return (higher + 0.05) / (lower + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

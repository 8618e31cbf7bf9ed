"""The site has every page and every public name. Where the extra `docs` is installed, it is built as by `make docs`."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

import penstock
from docs.scripts.pages import ROOT
from docs.scripts.reference import SECTIONS, defined_in

# All values as texts, tags passed over: one of them asks for a function of a package of the extra.
CONFIG: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)
needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="needs the extra `docs`: make docs"
)


def in_nav(entries: list[Any]) -> list[str]:
    """Returns the pages of a part of the nav. An entry is a page, or a title with a page or a part."""
    found: list[str] = []
    for entry in entries:
        for value in [entry] if isinstance(entry, str) else entry.values():
            found += in_nav(value) if isinstance(value, list) else [value]
    return found


def test_every_page_is_in_the_nav_once() -> None:
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("**/*.md")]
    made = ["index.md", "contributing.md", "reporting.md", "changes.md", *(f"reference/{name}.md" for name in SECTIONS)]
    assert Counter(in_nav(CONFIG["nav"])) == Counter([*pages, *made])


def test_it_is_strict_and_loads_no_fonts() -> None:
    assert CONFIG["strict"] == "true"
    assert CONFIG["theme"]["font"] == "false"
    assert set(CONFIG["validation"].values()) == {"warn"}


def test_it_is_searched_from_a_disk_by_files_of_its_own() -> None:
    assert {"search", "offline"} <= {each for each in CONFIG["plugins"] if isinstance(each, str)}
    assert [name for name in CONFIG["extra"]["polyfills"] if "iframe-worker" in name] == ["iframe-worker.js"]
    assert (ROOT / "docs" / "iframe-worker.js").is_file()


def test_every_public_name_is_in_the_reference_once() -> None:
    names = Counter(name for section in SECTIONS.values() for name in section.names)
    assert names == Counter([*penstock.__all__, "LLM"]) - Counter(["__version__"])


@pytest.mark.parametrize("name", sorted(set(penstock.__all__) - {"__version__"}))
def test_names_are_where_the_reference_looks_for_them(name: str) -> None:
    assert getattr(importlib.import_module(defined_in(name)), name) is getattr(penstock, name)


@needs_mkdocs
def test_it_is_built_and_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for name, section in SECTIONS.items():
        html = (tmp_path / "reference" / f"{name}.html").read_text()
        assert [each for each in section.names if f'id="{defined_in(each)}.{each}"' not in html] == []
    assert "user producer on" in (tmp_path / "repository" / "deploy" / "redis" / "users.acl.html").read_text()
    assert "var __index = {" in (tmp_path / "search" / "search_index.js").read_text()
    assert '<script src="../iframe-worker.js">' in (tmp_path / "reference" / "clients.html").read_text()
    assert 'src="architecture.svg"' in (tmp_path / "index.html").read_text()


@needs_mkdocs
def test_what_would_be_loaded_from_elsewhere_is_found(tmp_path: Path) -> None:
    hooks = importlib.import_module("docs.scripts.site_hooks")
    (tmp_path / "own.html").write_text(
        '<a href="https://example.org/"><img src="own.svg"></a><script src="/a.js"></script>'
    )
    (tmp_path / "font.css").write_text('@font-face { src: url("https://example.org/font.woff2") }')
    (tmp_path / "page.html").write_text('<link rel="stylesheet" href="//example.org/style.css">')
    found = [line for path in sorted(tmp_path.iterdir()) for line in hooks._loaded_from_elsewhere(path)]
    assert [line.rpartition(" ")[2] for line in found] == ["https://example.org/font.woff2", "//example.org/style.css"]

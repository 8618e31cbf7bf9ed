"""Links resolve, code is valid, and each page can be found: README.md, CHANGELOG.md, docs/ and their like."""

from __future__ import annotations

import json
import posixpath
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from docs.scripts.pages import ROOT, Block, all_pages, page
from tests.support.packages import PACKAGES

# Folders from the root: inline code that begins with one of them is a path.
FOLDERS = (*PACKAGES, "benchmarks", "constraints", "deploy", "docs", "examples", "penstock", "tests")
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*")


@pytest.mark.parametrize("name", all_pages())
def test_every_link_leads_to_a_file_and_a_heading(name: str) -> None:
    asked = page(name)
    broken = [
        f"{name}:{link.line}: {link.target}" for link in asked.links if not leads_somewhere(asked.path, link.target)
    ]
    assert broken == []


def leads_somewhere(source: Path, target: str) -> bool:
    parts = urlsplit(target)
    if parts.scheme:
        return parts.scheme == "https" and bool(parts.netloc)
    path = (source.parent / unquote(parts.path)).resolve() if parts.path else source
    if not path.exists() or not path.is_relative_to(ROOT):
        return False
    if not parts.fragment:
        return True
    return path.suffix == ".md" and parts.fragment in page(str(path.relative_to(ROOT))).anchors


@pytest.mark.parametrize("name", [name for name in all_pages() if name != "CHANGELOG.md"])
def test_every_path_in_inline_code_exists(name: str) -> None:
    """Paths in the changelog may be gone, as it is history."""
    spans = [span for span in page(name).spans if PATH.fullmatch(span.target)]
    assert [f"{name}:{span.line}: {span.target}" for span in spans if not (ROOT / span.target).exists()] == []


def test_readme_leads_to_every_page_and_is_short() -> None:
    linked = {urlsplit(link.target).path for link in page("README.md").links}
    pages = {name for name in all_pages() if name.startswith("docs/") or "/" not in name} - {"README.md"}
    reached = linked | {within(name, link.target) for name in linked & pages for link in page(name).links}
    assert pages - reached == set()
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def within(name: str, target: str) -> str:
    """Returns the path from the root that a link on a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), urlsplit(target).path))


def compile_python(block: Block) -> None:
    compile(block.text, "<block>", "exec")


def parse_shell(block: Block) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    parsed = subprocess.run([bash, "-n"], input=block.text, capture_output=True, text=True)
    assert (parsed.returncode, parsed.stderr) == (0, "")


CHECKS: dict[str, Callable[[Block], object]] = {
    "python": compile_python,
    "sh": parse_shell,
    "json": lambda block: json.loads(block.text),
    "yaml": lambda block: list(yaml.safe_load_all(block.text)),
    "toml": lambda block: tomllib.loads(block.text),
    "": lambda block: None,
}
BLOCKS = [
    pytest.param(block, id=f"{name}:{block.line}")
    for name in all_pages()
    for block in page(name).blocks
    if block.language
]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_of_code_is_what_it_says(block: Block) -> None:
    CHECKS[block.language](block)


def test_anchors_are_those_of_github() -> None:
    """Punctuation goes, each space becomes a hyphen, and the second heading of a name is numbered."""
    assert {"read-on", "use-it"} <= page("README.md").anchors
    assert {"openais-api", "what-a-request-may-say", "limits"} <= page("docs/gateway.md").anchors
    assert {"redis", "redis-1", "limits", "limits-of-http"} <= page("docs/configuration.md").anchors

"""Docstrings and comments name modules of ours, and names in them, that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.packages import PACKAGES, ROOT

_NAMED = re.compile(rf"`(?:penstock\.)?((?:{'|'.join(sorted(PACKAGES))})(?:\.[A-Za-z_]\w*)+)`")
_FILES = ("worker.py", "producer.py")  # files of users', in a test of what happens to their names


@cache
def _source(module: Path) -> str:
    return module.read_text()


def _exists(name: str) -> bool:
    """Whether the longest part of `name` that is a module has what follows in its source. What a package only hands on
    has its attributes elsewhere.
    """
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path, rest = ROOT.joinpath(*parts[:count]), parts[count:]
        if (module := path.with_suffix(".py")).exists() or (module := path / "__init__.py").exists():
            return not rest or re.search(rf"\b{rest[0]}\b", _source(module)) is not None
    return False


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_they_exist(package: str) -> None:
    files = [*ROOT.glob(f"{package}/**/*.py"), *(ROOT / "tests" / package).glob("**/*.py")]
    missing = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in _NAMED.findall(_source(file))
        if name not in _FILES and not _exists(name)
    }
    assert not missing


def test_what_does_not_exist_is_found() -> None:
    assert _NAMED.findall("see `producer.queue_load` and `penstock.protocol.keys`") == [
        "producer.queue_load",
        "protocol.keys",
    ]
    assert not _exists("producer.queue_load")
    assert not _exists("protocol.keys.no_such_key")
    assert _exists("protocol.keys.load")

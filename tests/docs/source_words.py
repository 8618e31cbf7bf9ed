"""Words that the code uses, read from its syntax, so that no error has to be provoked."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache

from docs.scripts.pages import ROOT

WARNINGS = ("warning", "error", "exception", "critical")
EVENT = re.compile(r"[a-z]+(_[a-z]+)*")


@cache
def sources(*folders: str) -> tuple[str, ...]:
    """Returns the Python files below folders of the repository, or single files of it."""
    paths = [path for folder in folders for path in (sorted((ROOT / folder).rglob("*.py")) or [ROOT / folder])]
    return tuple(path.read_text() for path in paths)


def nodes(*folders: str) -> Iterator[ast.AST]:
    """Yields all syntax nodes of those files."""
    return (node for source in sources(*folders) for node in ast.walk(ast.parse(source)))


def unsaid(words: Iterable[str], *folders: str) -> set[str]:
    """Returns the words that no file of the folders has as a string."""
    return {word for word in words if not any(f'"{word}"' in source for source in sources(*folders))}


def events(*folders: str) -> frozenset[str]:
    """Returns the events that the folders log as warnings or worse."""
    found: set[str] = set()
    for node in nodes(*folders):
        if isinstance(node, ast.Call) and node.args and _named(node.func) in (*WARNINGS, "log_unexpected"):
            found.update(text for text in _text_of(node.args[0]) if EVENT.fullmatch(text))
        elif isinstance(node, ast.Assign) and [_named(target) for target in node.targets] == ["event"]:
            found.update(text for part in ast.walk(node.value) for text in _text_of(part))
    return frozenset(found)


def _named(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _text_of(node: ast.AST) -> tuple[str, ...]:
    return (node.value,) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ()

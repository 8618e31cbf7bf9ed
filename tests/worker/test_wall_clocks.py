"""Pauses and deadlines follow monotonic clocks, as the wall clock of a host may step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.packages import PACKAGES, ROOT

FOLDERS = (*PACKAGES, "penstock")
LOOKS = frozenset({"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "ctime"})
MODULES = frozenset({"time", "datetime", "date"})

MAY_LOOK = re.compile(rf"({'|'.join(MODULES)})\s*\.\s*({'|'.join(LOOKS)})\b|from (time|datetime) import")

ALLOWED = {
    "engine/text/chat_template.py": "the date that a template may write into a prompt, where no request gives one",
    "serving/metric_push.py": "when figures were taken, for whom they are pushed to",
    "gateway/responses/events.py": "`created_at` of a reply that has no entry yet, shown and not compared",
    "tools/bench/machine.py": "when a bench ran, in its results",
    "local/in_process.py": "the date that a template may write into a prompt",
}
"""Files that may look at the wall clock, and what for."""


def looks(tree: ast.AST) -> Iterator[str]:
    """Yields calls of, and references to, what tells the time of day."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in LOOKS:
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name in MODULES:
                yield f"{name}.{node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield from (f"from {node.module} import {each.name}" for each in node.names if each.name in LOOKS)


def test_only_these_look_at_the_wall_clock() -> None:
    found = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text("utf-8")
            if MAY_LOOK.search(text) and (there := sorted(looks(ast.parse(text)))):
                found[str(path.relative_to(ROOT))] = there
    assert found.keys() == ALLOWED.keys(), found

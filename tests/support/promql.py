"""Reads what PromQL expressions query, without Prometheus; and finds the expressions of deploy/."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.packages import ROOT

DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
RULES = sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml"))

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_RANGE = re.compile(r"\[[^\]]*\]")
_MATCHERS = re.compile(r"([A-Za-z_:][\w:]*)?\s*\{([^}]*)\}")
_MATCHED = re.compile(r"(\w+)\s*(?:=|!)")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_NAME = re.compile(r"(?<![\w:.])([A-Za-z_:][\w:]*+)(?!\s*\()")
_WORDS = frozenset({"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring"})


def alerts() -> list[dict[str, Any]]:
    """Returns all rules of all groups, as written."""
    files = [yaml.safe_load(path.read_text()) for path in RULES]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def panels(dashboard: Path) -> list[dict[str, Any]]:
    """Returns the panels of a dashboard, without its rows."""
    return [panel for panel in json.loads(dashboard.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Yields the place and text of each expression."""
    for alert in alerts():
        yield alert["alert"], alert["expr"]
    for path in DASHBOARDS:
        for panel in panels(path):
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]


def metrics(expression: str) -> set[str]:
    """Returns the names of all metrics in an expression: what is neither a function, a keyword nor a label."""
    text = _RANGE.sub("", _GROUPING.sub("", _MATCHERS.sub(r"\1", _STRING.sub('""', expression))))
    return {name for name in _NAME.findall(text) if name not in _WORDS}


def labels(expression: str) -> set[str]:
    """Returns the names of all labels in an expression."""
    text = _STRING.sub('""', expression)
    matched = [name for _, inner in _MATCHERS.findall(text) for name in _MATCHED.findall(inner)]
    grouped = [name for inner in _GROUPING.findall(text) for name in inner.split(",")]
    return {name.strip() for name in (*matched, *grouped)} - {""}

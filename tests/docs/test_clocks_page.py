"""`docs/guarantees.md` says for every key what a step of the server's clock does to it."""

from __future__ import annotations

import inspect
import re

from penstock.gateway.store import names
from penstock.protocol import keys
from tests.support.packages import ROOT

PAGE = ROOT / "docs" / "guarantees.md"


def functions(module: object) -> set[str]:
    return {name for name, _ in inspect.getmembers(module, inspect.isfunction)}


def test_each_key_is_there_once() -> None:
    _, _, section = PAGE.read_text("utf-8").partition("## When a clock steps\n")
    section, _, _ = section.partition("\n## ")
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    _, _, timeless = section.partition("No time is in ")
    timeless, _, _ = timeless.partition(", but")
    told = re.findall(r"`(\w+)`", " ".join([*rows, timeless]))
    told.remove("timeout_s")  # a field
    assert sorted(told) == sorted(functions(keys) | functions(names))

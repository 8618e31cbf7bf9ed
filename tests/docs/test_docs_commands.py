"""Every command of ours that a page names exists: `penstock` with its options, make targets, and what Python runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from docs.scripts.pages import ROOT, all_pages, page
from penstock.cli import app

PAGES = [name for name in all_pages() if name != "CHANGELOG.md"]  # that one is history
ROOT_COMMAND: Any = typer.main.get_command(app)  # of a click that is typer's own
SHELL = re.compile(r"^(?:\$ )?(?:docker compose run --rm operator|\.venv/bin/penstock|penstock) (.*)$")
ENDS_A_COMMAND = frozenset("|&;><")
MAKE = re.compile(r"(?:[A-Z_]+=\S+ )*make ((?:[\w=-]+ ?)*)")
TARGETS = frozenset(" ".join(re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)).split())
MODULE = re.compile(r"python -m ((?:benchmarks|docs|penstock)[\w.]*)")


def commands(name: str) -> Iterator[tuple[int, str]]:
    """Yields the commands that a page tells its reader to run: inline code, and lines of shell."""
    for span in page(name).spans:
        if span.target.startswith("penstock "):
            yield span.line, span.target.removeprefix("penstock ")
    for block in page(name).blocks:
        if block.language in ("", "sh"):
            for line in block.text.replace("\\\n", " ").splitlines():
                if found := SHELL.match(line.strip()):
                    yield block.line, found[1]


def fault_of(line: str) -> str | None:
    """Returns what a command names that does not exist."""
    command, may_descend = ROOT_COMMAND, True
    for word in shlex.split(line, comments=True):
        if word[:1] in ENDS_A_COMMAND or word == "2>&1":
            return None
        subcommands = getattr(command, "commands", {})
        if word.startswith("-"):
            may_descend = False
            if word.partition("=")[0] not in options(command):
                return f"no option {word} of {command.name}"
        elif may_descend and subcommands:
            if word not in subcommands:
                return f"no command {word} of {command.name}"
            command = subcommands[word]
        else:
            may_descend = False
    return None


def options(command: Any) -> set[str]:
    named = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    return named | {"--help", "-h"}


@pytest.mark.parametrize("name", PAGES)
def test_every_command_is_there(name: str) -> None:
    found = [(line, command, fault_of(command)) for line, command in commands(name)]
    assert [f"{name}:{line}: penstock {command}: {fault}" for line, command, fault in found if fault] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_target_and_every_module_is_there(name: str) -> None:
    there = page(name)
    texts = [span.target for span in there.spans] + [
        block.text for block in there.blocks if block.language in ("", "sh")
    ]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    targets = {word for line in lines if (asked := MAKE.match(line)) for word in asked[1].split()}
    assert {word for word in targets if "=" not in word} <= TARGETS
    modules = {asked[1] for line in lines for asked in MODULE.finditer(line)}
    assert [module for module in modules if not is_runnable(ROOT.joinpath(*module.split(".")))] == []


def is_runnable(path: Path) -> bool:
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_faults_are_found() -> None:
    assert fault_of("wroker --model demo") == "no command wroker of penstock"
    assert fault_of("dead lst") == "no command lst of dead"
    assert fault_of("send 'Hello' --jason") == "no option --jason of send"
    assert fault_of("requests list | show | cancel") is None

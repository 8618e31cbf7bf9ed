"""Any value of any option is taken, or refused by the option's name with status 2."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Coroutine, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import typer.main

from penstock.cli import app
from penstock.cli.shared.errors import exit_status_of
from penstock.cli.shared.values import strict
from penstock.worker.settings import Settings
from penstock.worker.settings_loading import LONGEST_S
from tests.cli.cli_process import command, environment

JUNK = (
    "nan", "-inf", "-1", "0", "1e400", "1" + "0" * 30, "a\nb", "", "x", "\udc80", "{}", "9" * 400 + "d", "@/no/file",
    "1.5",
)  # fmt: skip
ELSEWHERE = ("worker", "gateway", "serve", "chat", "demo", "chaos", "plan", "bench")
"""Commands that start something: only what is checked before the command itself is tried here."""


NEEDED = {("top",): ["--once"], ("requests", "cancel"): ["--yes"], ("dead", "purge"): ["--yes"]}
GOOD: dict[tuple[tuple[str, ...], str], str] = {
    (("map",), "rows"): "rows.jsonl",
    (("map",), "output"): "out.jsonl",
}  # where "1" is not a value
USED = {(("drain",), "names"), (("dead", "replay"), "names"), (("dead", "purge"), "names")}  # these or --all


class Accepted(Exception):
    """Raised where the command would begin its work."""


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = getattr(tree, "commands", None)
    if below is None:
        yield path, tree
        return
    for name, each in below.items():
        yield from leaves(each, (*path, name))


LEAVES = dict(leaves(typer.main.get_command(app)))


def is_option(parameter: Any) -> bool:
    return bool(parameter.opts[0].startswith("-"))


def is_flag(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False))


def words(path: tuple[str, ...], name: str, value: str) -> list[str]:
    """Returns a call with the value, and with what else is needed."""
    options, arguments = [*path, *NEEDED.get(path, ())], []
    for each in LEAVES[path].params:
        good = GOOD.get((path, each.name), "1")
        given = value if each.name == name else good if each.required or (path, each.name) in USED else None
        if given is not None and is_option(each):
            options.append(f"{each.opts[0]}={given}")
        elif given is not None:
            arguments.append(given)
    return [*options, "--", *arguments]


def begin(work: Coroutine[Any, Any, Any]) -> NoReturn:
    work.close()
    raise Accepted


def of_its_own(path: tuple[str, ...]) -> list[Any]:
    """Returns the parameters that are not settings: `test_settings_values.py` has those."""
    known = Settings.model_fields.keys() - {"name"}
    return [each for each in LEAVES[path].params if not is_flag(each) and each.name not in known]


def test_there_are_some() -> None:
    assert sum(len(of_its_own(path)) for path in LEAVES) > 70


@pytest.mark.parametrize("path", sorted(LEAVES.keys() - {("worker",), ("gateway",), ("bench", "engine")}), ids=" ".join)
def test_what_a_command_is_given_is_taken_or_refused_by_name(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    tree = typer.main.get_command(app)
    seen: list[dict[str, Any]] = []
    if path[0] in ELSEWHERE:
        for _, leaf in leaves(tree):
            leaf.callback = lambda **given: seen.append(given)
    monkeypatch.setattr(asyncio, "run", begin)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("penstock.cli.typer.main.get_command", lambda _: tree)
    strict(tree)
    for parameter in of_its_own(path):
        for value in JUNK:
            check(tree, words(path, parameter.name, value), parameter)
    for given in seen:
        assert all(abs(value) <= LONGEST_S for value in given.values() if isinstance(value, float))


def check(tree: Any, arguments: list[str], parameter: Any) -> None:
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.dict(os.environ, environment(), clear=True), redirect_stdout(out), redirect_stderr(err):
        try:
            tree(arguments, prog_name="penstock")
        except Accepted:
            return
        except SystemExit as end:
            status, said = end.code, err.getvalue()
        except Exception as error:
            status, said = exit_status_of(error), str(error)
        else:
            return
    assert status in (0, 2), (arguments, said)
    assert not said or any(name in said for name in (parameter.opts[0], parameter.name, str(parameter.metavar)))


def test_a_refusal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = command("requests", "show", "a\nb", "--redis-url", "redis://127.0.0.1:1")
    assert (outcome.status, outcome.out) == (2, "")
    expected = "penstock: ID: must be without control characters, such as line breaks, not 'a\\nb'\n"
    assert outcome.err == expected
    outcome = command("drain", "w", "--timeout", "1e10", "--redis-url", "redis://127.0.0.1:1")
    assert (outcome.status, outcome.err) == (
        2,
        "penstock: --timeout: must be a number up to 1e+09, not '10000000000.0'\n",
    )


def test_a_redis_url_is_not_shown() -> None:
    outcome = command("chaos", "--redis-url", "redis://u:secret\n@h")
    assert outcome.status == 2
    assert "--redis-url" in outcome.err
    assert "secret" not in outcome.err


def test_numbers_have_bounds() -> None:
    """Each has a lower bound, so that no smaller value is accepted and fails later."""
    missing = [
        (" ".join(path), each.name)
        for path, leaf in LEAVES.items()
        for each in leaf.params
        if each.type_descriptor.annotation in (int, float)
        and each.min is None
        and path[0] not in ("bench", "send")  # they check loads, and requests, by themselves
    ]
    assert missing == []

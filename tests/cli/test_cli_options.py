"""Options made from a table: what is given reaches the command, and what is not is left out."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli.shared.options import gathers, option, takes_settings
from penstock.worker.settings import Settings, variable
from penstock.worker.settings_loading import SettingsError


def run(command: Any, *arguments: str) -> Any:
    """Runs a command; returns what it gathered."""
    app = typer.Typer()
    app.command()(command)
    outcome = CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False)
    return outcome.return_value if outcome.exception is None else outcome.exception


def test_only_what_is_given_is_gathered() -> None:
    seen: list[tuple[dict[str, Any], bool]] = []

    @gathers("load", [option("rate", float, "--rate"), option("seed", int, "--seed")], lambda given: given)
    def command(*, load: dict[str, Any], fast: bool = False) -> None:
        seen.append((load, fast))

    run(command, "--rate", "2.5", "--fast")
    run(command)
    assert seen == [({"rate": 2.5}, True), ({}, False)]


def test_a_command_keeps_its_own_parameters_and_gets_one_paragraph_per_line() -> None:
    @gathers("load", [option("rate", float, "--rate")], lambda given: given)
    def command(*, load: dict[str, Any], fast: bool = False) -> None:
        """First line
        goes on.

        Second paragraph.
        """

    assert list(inspect.signature(command).parameters) == ["fast", "rate"]
    assert command.__doc__ is not None
    assert command.__doc__.strip() == "First line goes on.\n\nSecond paragraph."


def test_settings_come_from_flags_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    @takes_settings(["redis_url", "queue"])
    def command(*, settings: Settings) -> None:
        seen.append(settings)

    monkeypatch.setenv(variable("queue"), "of-the-environment")
    monkeypatch.setenv(variable("redis_url"), "redis://elsewhere:1/0")
    run(command, "--queue", "of-the-flag")
    assert (seen[0].queue, seen[0].redis_url) == ("of-the-flag", "redis://elsewhere:1/0")


def test_a_setting_out_of_range_is_an_error_of_settings() -> None:
    @takes_settings(["queue"])
    def command(*, settings: Settings) -> None:
        raise AssertionError(settings)

    with pytest.raises(SettingsError, match=r"--queue: a queue's name has 1 to 128 .*, not 'no spaces allowed'"):
        run(command, "--queue", "no spaces allowed")

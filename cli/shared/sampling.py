"""Options for the parameters of requests, made from their declarations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from penstock.cli.shared.options import Decorator, gathers, option
from penstock.parameters import Parameter
from penstock.protocol.wire import PARAMETERS
from penstock.worker.settings_loading import flag

_FORMS = {
    "tools": "JSON|@FILE", "tool_choice": "TEXT|JSON", "reasoning_effort": "TEXT",
    "response_format": "JSON|@FILE", "regex": "TEXT", "grammar": "TEXT|@FILE",
}  # fmt: skip
"""Metavars of the options that say which form the answer has."""

_METAVARS: Mapping[Any, str | None] = {bool: None, int: "NUMBER", float: "NUMBER", int | bool: "NUMBER"}


def takes_sampling(*without: str) -> Decorator:
    """Replaces a command's parameter `sampling` by an option for each parameter that `penstock send` takes, but for
    those `without`.
    """
    sent = {name: each for name, each in PARAMETERS.items() if "send" in each.takers and name not in without}
    return gathers("sampling", [_option(name, each) for name, each in sent.items()], _read_files)


def _option(name: str, each: Parameter) -> inspect.Parameter:
    is_list = each.type == str | Sequence[str]
    return option(
        name,
        list[str] if is_list else bool if each.type is bool else str,
        flag(name),
        help=f"{each.text} May be repeated." if is_list else each.text,
        metavar=_FORMS.get(name, _METAVARS.get(each.type, "TEXT")),
        rich_help_panel="Answer" if name in _FORMS else "Request",
    )


def _read_files(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options, with the text of each file that is named."""
    return {
        name: text_or_file(value, flag(name)) if "@FILE" in _FORMS.get(name, "") else value
        for name, value in given.items()
    }


def text_or_file(value: str, option: str) -> str:
    """Returns an option's value, or the text of the file that it names after an `@`.

    Raises:
        BadParameter: the file can't be read.
    """
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{value[1:]} cannot be read: {error}", param_hint=option) from error

"""Makes the options of subcommands from a table, so that each is described in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from penstock.cli.shared.programs import PROGRAMS
from penstock.protocol.redis.credentials import Rereadable
from penstock.serving.setting_fields import default_text, group_of
from penstock.worker.settings import WORKER
from penstock.worker.settings_loading import Program, flag, load

Subcommand = Callable[..., None]
Decorator = Callable[[Subcommand], Subcommand]


def takes_settings(names: Iterable[str], program: Program[Any] = WORKER) -> Decorator:
    """Replaces a command's parameter `settings` by one option for each of `names`, and `--config`.

    Values stay text: `load` reads them as it reads the environment.
    """
    options = settings_options(names, program)

    def build(given: dict[str, Any]) -> Rereadable:
        config = given.pop("config", None)
        loaded: Rereadable = load(program, PROGRAMS, given, config)
        return loaded

    return gathers("settings", [*options, CONFIG], build)


def settings_options(names: Iterable[str], program: Program[Any]) -> list[inspect.Parameter]:
    """Makes an option for each of these settings."""
    return [_setting_option(name, program.settings.model_fields[name]) for name in names]


def gathers(
    gathered: str, options: Sequence[inspect.Parameter], build: Callable[[dict[str, Any]], object]
) -> Decorator:
    """Replaces a command's parameter `gathered` by `options`; the command receives `build` of the given ones."""

    def decorate(command: Subcommand) -> Subcommand:
        parameters = inspect.signature(command, eval_str=True).parameters.values()
        kept = [parameter for parameter in parameters if parameter.name != gathered]

        def run(**given: Any) -> None:
            named = {option.name: given.pop(option.name) for option in options}
            command(**{gathered: build({name: value for name, value in named.items() if value is not None})}, **given)

        run.__name__ = command.__name__
        run.__doc__ = _reflowed(command.__doc__ or "")
        run.__signature__ = inspect.Signature([*kept, *options])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return decorate


def option(name: str, kind: Any, spelling: str, **details: Any) -> inspect.Parameter:
    """Makes an option that is None when it is not given."""
    default = typer.Option(None, spelling, **details)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind | None)


def _reflowed(text: str) -> str:
    """Joins each paragraph into one line, for the terminal to wrap."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _setting_option(name: str, field: FieldInfo) -> inspect.Parameter:
    return option(
        name,
        str,
        flag(name),
        help=f"{field.description} [dim]\\[{default_text(field)}][/]" if default_text(field) else field.description,
        metavar=_metavar(field),
        rich_help_panel=f"{group_of(field)} settings",
    )


def _metavar(field: FieldInfo) -> str:
    """Returns the metavar of a setting: the words of a Literal, otherwise its kind."""
    kinds: list[Any] = [kind for kind in get_args(field.annotation) or [field.annotation] if kind is not type(None)]
    if isinstance(kinds[0], str):
        return "|".join(kinds)
    return _METAVARS.get(getattr(kinds[0], "__origin__", kinds[0]), "TEXT")  # the type inside Annotated


_METAVARS: dict[type, str] = {int: "NUMBER", float: "NUMBER", bool: "on|off", Path: "PATH", ByteSize: "BYTES"}

CONFIG = option(
    "config",
    Path,
    "--config",
    help="TOML file with settings. [dim]\\[penstock.toml, if it is there][/]",
    metavar="PATH",
)

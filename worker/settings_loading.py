"""Joins the command line, the environment and the TOML file into the settings of one program."""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import ValidationError

from penstock.engine.errors import ConfigError
from penstock.protocol.redis.credentials import Rereadable
from penstock.worker.errors import BadWorkerConfig

CONFIG_VARIABLE = "PENSTOCK_CONFIG"
FALLBACK_URL_VARIABLE = "REDIS_URL"
DEFAULT_CONFIG = Path("penstock.toml")
MAX_FILE_BYTES = 1 << 20

S = TypeVar("S", bound=Rereadable)


class SettingsError(ValueError):
    """Raised for a setting that is unknown or cannot be used. The message says which and where it was set, never a
    password.
    """


@dataclass(frozen=True, slots=True)
class Program(Generic[S]):
    """A program with settings of its own.

    Attributes:
        settings: their class.
        prefix: of their environment variables.
        table: of the TOML file that holds them; None: its top level.
        shared: settings taken from the first of `PROGRAMS` if not set.
    """

    settings: type[S]
    prefix: str
    table: str | None = None
    shared: frozenset[str] = frozenset()

    def variable(self, name: str) -> str:
        return self.prefix + name.upper()

    @property
    def variables(self) -> set[str]:
        return {self.variable(name) for name in self.settings.model_fields}


class _Source(NamedTuple):
    values: Mapping[str, Any]
    where: Callable[[str], str]  # names a setting's place for messages


def flag(name: str) -> str:
    """Returns the command-line option of a setting."""
    return "--" + name.replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str:
    """Ends a message about an unknown name with the known one that was probably meant; "" if none is similar."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def load(
    program: Program[S], programs: Sequence[Program[Any]], flags: Mapping[str, Any], config: Path | None = None
) -> S:
    """Loads the settings of `program`, each from the first of flags, environment and file that has it.

    The file is `config`, else the one in PENSTOCK_CONFIG, else `penstock.toml` in the current folder if it exists. File
    and environment may have settings of all `programs`, the first of which shares some with the others.

    Raises:
        SettingsError: a name is unknown, or a value or the file cannot be read.
    """
    path = config or _configured_path()
    document = _read_toml(path, programs) if path is not None else {}
    _refuse_unknown_variables(programs)
    sources = _sources(program, programs[0], flags, document, path)
    joined: dict[str, Any] = {}
    for source in reversed(sources):
        joined.update(source.values)
    fields = program.settings.model_fields
    joined = {name: _cleaned(name, fields[name].annotation, value, sources) for name, value in joined.items()}
    try:
        settings = program.settings(**joined)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(item, sources) for item in error.errors())) from None
    for name in joined:
        _check_bounds(name, getattr(settings, name), sources)
    try:
        settings.check()
    except (ConfigError, BadWorkerConfig) as error:
        raise SettingsError(_placed(str(error), error.settings, sources)) from None
    settings.reread_by(partial(load, program, programs, flags, config), _places(joined, sources))
    return settings


def _sources(
    program: Program[Any], first: Program[Any], flags: Mapping[str, Any], document: Mapping[str, Any], path: Path | None
) -> list[_Source]:
    """Returns the sources in order of precedence."""
    programs = [program] if program is first else [program, first]
    common = [program.settings.model_fields, program.shared]  # taken from each of them
    pairs = list(zip(programs, common, strict=False))
    fallback = {"redis_url": url} if (url := os.environ.get(FALLBACK_URL_VARIABLE)) else {}
    return [
        _Source(flags, flag),
        *(_Source(_read_environment(other, names), other.variable) for other, names in pairs),
        *(_Source(_read_file(other, names, document), _place_in(other, path)) for other, names in pairs),
        _Source(fallback, lambda _: FALLBACK_URL_VARIABLE),
    ]


def _read_environment(program: Program[Any], names: Iterable[str]) -> Mapping[str, str]:
    """Reads the environment. An empty variable counts as not set."""
    present = {name.upper(): value for name, value in os.environ.items() if value}
    return {name: present[variable] for name in names if (variable := program.variable(name)) in present}


def _read_file(program: Program[Any], names: Iterable[str], document: Mapping[str, Any]) -> Mapping[str, Any]:
    table = document if program.table is None else document.get(program.table, {})
    return {name: table[name] for name in names if name in table}


def _place_in(program: Program[Any], path: Path | None) -> Callable[[str], str]:
    table = "" if program.table is None else f"[{program.table}] of "
    return lambda name: f"{name} in {table}{path}"


_KUBERNETES_BYTES = re.compile(r"\d+(\.\d+)?\s*[KMGTP]i")
SHORTEST_S, LONGEST_S = 0.001, 1e9
"""Bounds of times: Redis's resolution, and some thirty years."""

MOST_SHOWN = 600
"""Characters of a value, and of the text about it, that a message shows."""


def _cleaned(name: str, kind: Any, value: Any, sources: Sequence[_Source]) -> Any:
    """Strips what surrounds a value in files, secrets and shells. `1Gi` is `1GiB`, as Kubernetes writes it."""
    if isinstance(value, bool) and kind is not bool:  # a bool would be 1 or 0
        raise SettingsError(f"{_where(name, sources)}: must not be {str(value).lower()}")
    if not isinstance(value, str):
        return value
    value = value.strip()
    if not value.isprintable():
        raise SettingsError(f"{_where(name, sources)}: a control character, such as a line break, is in the value")
    return f"{value}B" if _KUBERNETES_BYTES.fullmatch(value) else value


def _check_bounds(name: str, value: Any, sources: Sequence[_Source]) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if not math.isfinite(value):
        raise SettingsError(f"{_where(name, sources)}: must be a finite number, not {value}")
    if name.endswith("_s") and value and not SHORTEST_S <= abs(value) <= LONGEST_S:
        raise SettingsError(f"{_where(name, sources)}: must be from {SHORTEST_S:g} to {LONGEST_S:g} s, not {value:g}")
    if name.endswith("_ms") and abs(value) > LONGEST_S * 1000:
        raise SettingsError(f"{_where(name, sources)}: must be at most {LONGEST_S * 1000:g} ms, not {value:g}")
    if abs(value) >= 2**63:
        raise SettingsError(f"{_where(name, sources)}: must be below 2^63, not {value}")


def _where(name: str, sources: Sequence[_Source]) -> str:
    return next(source.where(name) for source in sources if name in source.values)


def _places(names: Iterable[str], sources: Sequence[_Source]) -> Mapping[str, str]:
    """Returns where each of the settings that are set was taken from."""
    return {name: _where(name, sources) for name in names if any(name in source.values for source in sources)}


def _placed(message: str, names: Sequence[str], sources: Sequence[_Source]) -> str:
    """Prefixes a message about settings with where they were set; the message names them."""
    places = ", ".join(_places(names, sources).values())
    if len(names) == 1:
        message = message.removeprefix(f"{names[0]} ")
    return f"{places}: {_short(message)}" if places else message


def _explain(item: Any, sources: Sequence[_Source]) -> str:
    """Names the place that the offending value came from, or several if several values are involved."""
    message = item["msg"].removeprefix("Value error, ")
    if not item["loc"]:
        return _placed(str(message), getattr(item.get("ctx", {}).get("error"), "settings", ()), sources)
    name = str(item["loc"][0])
    shown = "" if name.endswith("redis_url") else f", not {_shown(item['input'])}"
    return f"{_where(name, sources)}: {_short(message)}{shown}"


def _shown(value: object) -> str:
    return _short(repr(str(value)))


def _short(text: str) -> str:
    """Cuts a message that shows a long value."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _configured_path() -> Path | None:
    named = os.environ.get(CONFIG_VARIABLE)
    if named:
        return Path(named)
    return DEFAULT_CONFIG if os.path.lexists(DEFAULT_CONFIG) else None


def _read_toml(path: Path, programs: Sequence[Program[Any]]) -> dict[str, Any]:
    document = _parsed(path)
    tables = {program.table for program in programs if program.table is not None}
    for program in programs:
        if program.table is None:
            _refuse_unknown_names(program, document.keys() - tables, str(path))
        elif isinstance(table := document.get(program.table, {}), Mapping):
            _refuse_unknown_names(program, table, f"[{program.table}] of {path}")
        else:
            raise SettingsError(f"{program.table} in {path} is not a table: write [{program.table}]")
    return document


def _parsed(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: the name contains a zero byte
        raise SettingsError(f"configuration file {path} cannot be read: {error}") from error
    if len(text) > MAX_FILE_BYTES:
        raise SettingsError(f"configuration file {path} has over {MAX_FILE_BYTES} bytes: it is not a settings file")
    try:
        return tomllib.loads(text.decode("utf-8-sig"))  # some editors write a byte-order mark
    except UnicodeDecodeError as error:
        raise SettingsError(f"configuration file {path} is not TOML, which is UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:  # also raised for too long numbers and too deep brackets
        raise SettingsError(f"configuration file {path} is not TOML: {error}") from error


def _refuse_unknown_names(program: Program[Any], names: Iterable[str], where: str) -> None:
    for name in sorted(names):
        if name not in program.settings.model_fields:
            near = nearest(name, program.settings.model_fields)
            raise SettingsError(f"unknown setting {_shown(name)} in {where}{near}")


def _refuse_unknown_variables(programs: Sequence[Program[Any]]) -> None:
    prefix = programs[0].prefix
    known = {CONFIG_VARIABLE}.union(*(program.variables for program in programs))
    for name in sorted(os.environ):
        if name.upper().startswith(prefix) and name.upper() not in known:
            raise SettingsError(f"unknown environment variable {name}{nearest(name.upper(), known)}")

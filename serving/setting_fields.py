"""Fields of the settings of programs. Each has a group and a meaning, for `--help` and for docs/configuration.md."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo


def _none(value: object) -> object:
    return None if isinstance(value, str) and value.lower() == "none" else value


OrNone = BeforeValidator(_none)
"""Takes `none` for None."""


def _split(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(name for part in value.split(",") if (name := part.strip()))


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""A list, which may be written with commas between."""


def setting(group: str, text: str, default: Any, shown: str | None = None, **more: Any) -> Any:
    """Makes a field. `shown` is the text for its default, where that differs from the value."""
    extra: JsonDict = {"group": group} if shown is None else {"group": group, "default": shown}
    return Field(default, description=text, json_schema_extra=extra, **more)


def default_text(field: FieldInfo) -> str:
    """Returns the default of a setting as a person writes it."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "default" in extra:
        return str(extra["default"])
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, tuple):
        return ",".join(field.default)
    if isinstance(field.default, float):
        return f"{field.default:.15g}"
    return "none" if field.default is None else str(field.default)


def group_of(field: FieldInfo) -> str:
    """Returns the heading of a setting in `--help` and in docs/configuration.md."""
    extra = field.json_schema_extra
    return str(extra["group"]) if isinstance(extra, dict) else ""

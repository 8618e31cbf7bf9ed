"""Makes the prompt of a row, from a column or a template."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.producer.request import Prompt
from penstock.tools.map.errors import MapError
from penstock.tools.map.values import as_text

PROMPT, MESSAGES = "prompt", "messages"


class NoPrompt(Exception):
    """A row makes no prompt; the message says why."""


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Where prompts come from.

    Attributes:
        column: the column that holds them; None: `messages`, else `prompt`, else the only one there is.
        template: text with columns in braces, instead of a column.
        system: the system message of each chat.
        plain: texts are continued as they are, without the model's chat template.
    """

    column: str | None = None
    template: str | None = None
    system: str | None = None
    plain: bool = False

    def check(self) -> None:
        """Checks what holds for every row.

        Raises:
            MapError: two options exclude each other, or the template can't be read.
        """
        if self.column is not None and self.template is not None:
            raise MapError("a prompt comes from --column or from --template, not from both")
        if self.plain and self.system is not None:
            raise MapError("a system message needs the chat template: leave out --plain or --system")
        if self.template is not None and not any(name for _, name in _parts(self.template)):
            raise MapError("--template: it names no column, such as {text}: all prompts would be the same")

    def prompt(self, columns: Mapping[str, Any]) -> Prompt:
        """Returns the prompt of a row.

        Raises:
            NoPrompt: the row lacks a column, or holds something else there.
        """
        if self.template is not None:
            return self._of_text(_filled(self.template, columns))
        value = _value(columns, self._column_of(columns))
        if isinstance(value, str):
            return self._of_text(value)
        if not isinstance(value, list):
            raise NoPrompt(f"the prompt is {value!r:.80}, which is neither a text nor a list of messages or tokens")
        if self.system is None:
            return value
        if any(not isinstance(each, dict) for each in value) or value[0].get("role") == "system":
            raise NoPrompt("a system message can't precede tokens, or another one")
        return [{"role": "system", "content": self.system}, *value]

    def _column_of(self, columns: Mapping[str, Any]) -> str:
        if self.column is not None:
            return self.column
        for name in (MESSAGES, PROMPT):
            if name in columns:
                return name
        if len(columns) == 1:
            return next(iter(columns))
        raise NoPrompt(f"no column is called prompt or messages: say --column, one of {', '.join(columns)[:200]}")

    def _of_text(self, text: str) -> Prompt:
        if self.plain:
            return text
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": text}]


def _value(columns: Mapping[str, Any], name: str) -> Any:
    value = columns.get(name)
    if value is None or value in ("", []):
        raise NoPrompt(f"column {name!r} is {'empty' if name in columns else 'missing'}")
    if name == MESSAGES and isinstance(value, str):  # of a CSV
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise NoPrompt(f"column {name!r} holds no JSON: {error}") from error
    return value


def _filled(template: str, columns: Mapping[str, Any]) -> str:
    text = ""
    for literal, name in _parts(template):
        text += literal
        if name:
            value = columns.get(name)
            if value is None:
                raise NoPrompt(f"the template's column {name!r} is {'empty' if name in columns else 'missing'}")
            text += as_text(value)
    return text


def _parts(template: str) -> list[tuple[str, str]]:
    """Returns the template as pairs of a text and the column after it, or "" at the end.

    Raises:
        MapError: a brace is alone, or more than a column's name is in a pair.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise MapError(f"--template can't be read: {error}; write a literal brace twice") from error
    for _, name, form, conversion in parts:
        if name is not None and (not name or form or conversion):
            raise MapError(
                "--template: a pair of braces holds a column's name and nothing else; {{ is a brace of the text"
            )
    return [(literal, name or "") for literal, name, _, _ in parts]

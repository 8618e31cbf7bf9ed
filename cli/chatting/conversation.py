"""A conversation of several turns, and the commands that change it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.producer.request import check_options
from penstock.protocol.errors import RequestRefused
from penstock.protocol.wire import PARAMETERS
from penstock.worker.settings_loading import nearest

_NOT_IN_A_CHAT = {"n", "logprobs", "tools", "tool_choice"}  # a terminal has no place for what they bring
SETTABLE = [
    name for name, each in PARAMETERS.items() if {"chat", "send"} <= {*each.takers} and name not in _NOT_IN_A_CHAT
]
"""Parameters that `/set` takes."""

HELP = '''\
/system TEXT      the system message; without a text, none
/set NAME VALUE   a parameter of the answers, such as temperature; without a value, the model's own; /set shows all
/reset            forget the turns so far
/save FILE        write the conversation as JSON
/bye              leave, as does Ctrl-D
Ctrl-C stops an answer. A text of several lines goes between two lines """, or each but the last ends in \\.'''


class Refused(Exception):
    """A command that cannot be carried out. The message says why."""


class Left(Exception):
    """Raised by the command that ends the conversation."""


@dataclass(slots=True)
class Conversation:
    """What the model is shown."""

    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> list[dict[str, Any]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns]

    def ask(self, text: str) -> list[dict[str, Any]]:
        """Returns the messages that a new turn begins with. It is kept once `answered`."""
        return [*self.messages, {"role": "user", "content": text}]

    def answered(self, asked: str, text: str) -> None:
        self.turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]

    def command(self, line: str) -> str:
        """Carries out a line that begins with `/`. Returns what to say.

        Raises:
            Refused: there is no such command, or it cannot be carried out.
            Left: the conversation is over.
        """
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], str]] = {
            "/reset": self._reset, "/system": self._set_system, "/set": self._set,
            "/save": self._save, "/help": self._help, "/bye": self._leave,
        }  # fmt: skip
        if name not in commands:
            raise Refused(f"there is no command {name}{nearest(name, commands)}; /help lists them")
        return commands[name](rest.strip())

    def _reset(self, rest: str) -> str:
        _take_nothing("/reset", rest)
        self.turns.clear()
        return "the turns are forgotten" + ("" if self.system is None else "; the system message stays")

    def _set_system(self, rest: str) -> str:
        self.system = rest or None
        return "the model gets this system message from now on" if rest else "there is no system message now"

    def _set(self, rest: str) -> str:
        name, _, value = rest.partition(" ")
        if not name:
            shown = (f"{each} = {self.settings[each]!r}" if each in self.settings else each for each in SETTABLE)
            return "\n".join(shown)
        if name not in SETTABLE:
            raise Refused(f"there is no parameter {name!r}{nearest(name, SETTABLE)}; /set lists them")
        if not value.strip():
            self.settings.pop(name, None)
            return f"{name} is the model's own"
        changed = {**self.settings, name: _read(value.strip())}
        try:
            check_options(changed)  # type: ignore[arg-type]  # that is what it checks
        except RequestRefused as error:
            raise Refused(error.message) from None
        self.settings = changed
        return f"{name} = {changed[name]!r}"

    def _save(self, rest: str) -> str:
        if not rest:
            raise Refused("/save needs the name of a file")
        path = Path(rest).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump({"messages": self.messages, **self.settings}, file, ensure_ascii=False, indent=1)
        except FileExistsError:
            raise Refused(f"{path} is there already; nothing was written") from None
        except (OSError, RuntimeError) as error:
            raise Refused(f"{path} can't be written: {error}") from error
        return f"saved {len(self.turns) // 2} turns to {path}"

    def _leave(self, rest: str) -> str:
        _take_nothing("/bye", rest)
        raise Left

    def _help(self, rest: str) -> str:
        _take_nothing("/help", rest)
        return HELP


def _take_nothing(name: str, rest: str) -> None:
    if rest:
        raise Refused(f"{name} takes nothing, not {rest!r}")


def _read(value: str) -> Any:
    """Reads a value as JSON, or else as text."""
    try:
        return json.loads(value)
    except ValueError:
        return value

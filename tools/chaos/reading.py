"""Reads the chunks of one choice from their raw fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Truth:
    """The expected reply of one choice. `calls` is as `ChoiceRead.calls_text` writes them."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str = "length"
    reasoning: str = ""
    calls: str = ""
    stop: str = ""  # the stop string, or the id of the token, that ended it


@dataclass(slots=True)
class PartialCall:
    """A tool call, as far as it was read."""

    id: str
    name: str
    arguments: list[str]


@dataclass(slots=True)
class ChoiceRead:
    """One choice, as far as it was read."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[PartialCall] = field(default_factory=list)
    stop: str = ""

    def add(self, fields: Mapping[str, str]) -> Iterator[str]:
        """Takes the fields of a chunk; yields errors in how its tool calls continue."""
        self.tokens += tokens_of(fields)
        self.texts.append(fields["text"])
        self.reasoning.append(fields.get("reasoning", ""))
        self.stop = stop_of(fields) or self.stop
        for delta in json.loads(fields.get("tool_calls", "[]")):
            index, begins = delta["index"], "id" in delta
            if index != len(self.calls) - (not begins):
                yield f"call {index} {'begins' if begins else 'goes on'} after {len(self.calls)} calls"
            self.add_call(delta.get("id"), delta.get("name"), delta["arguments"])

    def add_call(self, id_: str | None, name: str | None, arguments: str) -> None:
        """Adds a part of a tool call; one with an id begins a new call."""
        if id_ is not None or not self.calls:
            self.calls.append(PartialCall(id_ or "", name or "", []))
        self.calls[-1].arguments.append(arguments)

    def truth(self, finish_reason: str, stop: str = "") -> Truth:
        """Returns the truth for requests that must give the same."""
        return Truth(
            tuple(self.tokens),
            "".join(self.texts),
            finish_reason,
            "".join(self.reasoning),
            self.calls_text(),
            stop or self.stop,
        )

    def calls_text(self) -> str:
        """Joins ids, names and arguments; a partial reply's text is a prefix of the whole."""
        return "\n".join(f"{call.id} {call.name} {''.join(call.arguments)}" for call in self.calls)


def tokens_of(fields: Mapping[str, str]) -> list[int]:
    """Returns the tokens of a chunk."""
    return [int(token) for token in fields.get("tokens", "").split(",") if token]


def stop_of(fields: Mapping[str, str]) -> str:
    """Returns what stopped a choice, from its last chunk or the end."""
    return fields.get("stop_string", fields.get("stop_token_id", ""))

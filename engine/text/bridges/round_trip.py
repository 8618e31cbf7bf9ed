"""Finds the format whose reader reads back what a chat template writes for the assistant.

Small turns are rendered: a text, a thought, a call, two calls, and a call with arguments of every type. Each format's
reader gets them as a reply. What a template does not write is untested.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.text.bridges.probe import Message
from penstock.engine.text.response.choice import NO_MARKS, named_in, reply_prefix, shows_reasoning
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.response.reading.delta import Delta, joined
from penstock.engine.text.response.reading.replies import ReplyFormats
from penstock.engine.text.response.syntax import ReplyFormat, TurnMarks

RenderTurn: TypeAlias = Callable[[Sequence[Message], Sequence[Message], bool], str | None]

_FUNCTION, _WORD, _THOUGHT = "penstock_look", "penstock-word", "penstock-thought"
_VALUES: Mapping[str, Any] = {
    "text": _WORD,
    "whole": 3,
    "part": 0.5,
    "sure": True,
    "nothing": None,
    "many": ["penstock-a", 2],
    "inner": {"penstock": "b", "deep": [1]},
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "A text."},
        "whole": {"type": "integer", "description": "A number."},
        "part": {"type": "number", "description": "A number."},
        "sure": {"type": "boolean", "description": "Whether."},
        "nothing": {"type": "null", "description": "Nothing."},
        "many": {"type": "array", "items": {}, "description": "A list."},
        "inner": {"type": "object", "description": "An object."},
    },
    "required": ["text"],
}
_SHOWN_TOOL: Message = {
    "type": "function",
    "function": {"name": _FUNCTION, "description": "Looks.", "parameters": _SCHEMA},
}
_TOOLS = (Tool(_FUNCTION, json.dumps(_SCHEMA)),)
_QUESTION: Message = {"role": "user", "content": "Hi."}
MIN_ANCHOR_CHARS = 4  # shorter ones occur in any text
_OPENINGS = "<["  # of tags


class Ability(Enum):
    """Something that a reply may have."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "a call"
    CALLS = "several calls"
    TYPES = "arguments of each type"


@dataclass(frozen=True, slots=True)
class Readback:
    """The format of a template's replies, and what it reads of them."""

    format: str | None  # None: they are plain text
    written: frozenset[Ability] = frozenset()  # what the template writes
    read: frozenset[Ability] = frozenset()  # what of that is read back
    turn: TurnMarks = NO_MARKS  # what the template puts around an answer

    def fails(self, ability: Ability) -> bool:
        """Whether the template writes it, and it comes back wrong."""
        return ability in self.written and ability not in self.read


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn of the assistant as a template writes it."""

    head: str  # the prompt before it
    text: str
    text_wanted: str
    reasoning: str
    calls: tuple[Mapping[str, Any], ...]  # arguments of each


def read_back(render: RenderTurn, source: str, special_tokens: Iterable[str], setting: str | None = None) -> Readback:
    """Finds the format of a template, and what it reads back.

    Args:
        render: renders messages and tools, with the head of an answer or without; None: the template refuses them.
        source: the template's text.
        special_tokens: the tokenizer's, as they are spelled.
        setting: the format that an operator chose; None: the best is chosen.
    """
    turns, (head, end) = _turns(render)
    readers = _Readers(special_tokens)
    written = frozenset(turns)
    names = list(FORMATS) if setting is None else [setting]
    read = {name: frozenset(of for of, turn in turns.items() if readers.reads(name, turn)) for name in names}
    chosen = setting or _chosen(source, written, read)
    if chosen is None:
        return Readback(None, written, frozenset({Ability.TEXT}))
    return Readback(chosen, written, read[chosen], _marks(FORMATS[chosen], head, end))


def _marks(format_: ReplyFormat, head: str, end: str) -> TurnMarks:
    """Returns what comes before an answer, without a thought that the head opens, and after it."""
    tags = (format_.reasoning.begin.strip(), format_.reasoning.end.strip()) if format_.reasoning else ()
    places = [place for tag in tags if (place := head.find(tag)) >= 0]
    anchor = head[: min(places, default=len(head))]
    return TurnMarks((anchor,) if len(anchor.strip()) >= MIN_ANCHOR_CHARS else (), end.strip())


def _chosen(source: str, written: frozenset[Ability], read: Mapping[str, frozenset[Ability]]) -> str | None:
    """Returns the format that reads most. Where no calls are written, the tags in the template name it."""
    named = named_in(source)
    fit = {name: abilities for name, abilities in read.items() if Ability.TEXT in abilities or not written}
    callers = {name: abilities for name, abilities in fit.items() if Ability.CALL in abilities}
    thinkers = {name: abilities for name, abilities in fit.items() if Ability.REASONING in abilities}
    if callers:
        return max(callers, key=lambda name: (len(callers[name]), name in named))
    if Ability.CALL not in written:
        fitting = [name for name in named if name in fit]
        if fitting:
            return max(fitting, key=lambda name: Ability.REASONING in fit[name])
    if thinkers:
        return next((name for name in named if name in thinkers), next(iter(thinkers)))
    if Ability.REASONING in written:
        return None
    return next((name for name in (*named, "hermes") if name in fit and shows_reasoning(name, source)), None)


class _Readers:
    """Reads turns as replies of a model whose tokenizer has these special tokens."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        ids = {token: place for place, token in enumerate(special_tokens)}
        self._formats = ReplyFormats(ids)
        self._special = re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True))) or r"\Z.")

    def reads(self, name: str, turn: _Turn) -> bool:
        """Whether this format's reader recovers from a turn what it was made of."""
        prefix = reply_prefix(name, turn.head)
        parser = self._formats.parser(ResponseSpec(name, prefix, _TOOLS), "", 0)
        written = self._formats.dialect(name).written(turn.text)
        found = joined(parser.push(self._special.sub("", written)), parser.finish())
        return _is_right(found, turn)


def _is_right(found: Delta, turn: _Turn) -> bool:
    if (found.text.strip(), found.reasoning.strip()) != (turn.text_wanted, turn.reasoning):
        return False
    if [call.name for call in found.tool_calls] != [_FUNCTION] * len(turn.calls):
        return False
    try:
        return [json.loads(call.arguments) for call in found.tool_calls] == list(turn.calls)
    except ValueError:
        return False


def _turns(render: RenderTurn) -> tuple[dict[Ability, _Turn], tuple[str, str]]:
    """Renders a turn for each ability; what the template does not write is left out. Returns also the head of an
    answer, and what comes after it.
    """
    prompt = render([_QUESTION], [_SHOWN_TOOL], True)
    said = render([_QUESTION, {"role": "assistant", "content": _WORD}], [_SHOWN_TOOL], False)
    if prompt is None or said is None or _WORD not in said:
        return {}, ("", "")
    asked = render([_QUESTION], [_SHOWN_TOOL], False) or ""
    head = prompt[len(asked) :] if asked and prompt.startswith(asked) else ""
    ending = said[said.rindex(_WORD) + len(_WORD) :]

    def turn(message: Message, text: str, reasoning: str, *calls: Mapping[str, Any]) -> _Turn | None:
        whole = render([_QUESTION, {"role": "assistant", **message}], [_SHOWN_TOOL], False)
        if whole is None:
            return None
        head, written = _split(prompt, whole)
        return _Turn(head, _without_end(written, ending), text, reasoning, calls)

    one, other = {"text": _WORD}, {"text": _WORD + "-2"}
    thought = {"reasoning": _THOUGHT}
    made = {
        Ability.TEXT: [turn({"content": _WORD}, _WORD, "")],
        Ability.REASONING: [
            turn({"content": _WORD, **thought}, _WORD, _THOUGHT),
            turn({"tool_calls": _calls(one), **thought}, "", _THOUGHT, one),
        ],
        Ability.CALL: [turn({"tool_calls": _calls(one)}, "", "", one)],
        Ability.CALLS: [turn({"tool_calls": _calls(one, other)}, "", "", one, other)],
        Ability.TYPES: [turn({"tool_calls": _calls(_VALUES)}, "", "", _VALUES)],
    }
    found = {
        ability: next((each for each in turns if each is not None and _shows(each)), None)
        for ability, turns in made.items()
    }
    return {ability: each for ability, each in found.items() if each is not None}, (head, ending)


def _shows(turn: _Turn) -> bool:
    """Whether a turn has in it what it was made of."""
    words = [turn.text_wanted, turn.reasoning, *(call["text"] for call in turn.calls)]
    return all(word in turn.text for word in words) and turn.text.count(_FUNCTION) >= len(turn.calls)


def _calls(*arguments: Mapping[str, Any]) -> list[Message]:
    return [
        {
            "id": f"call_{place:024}",
            "type": "function",
            "function": {"name": _FUNCTION, "arguments": dict(each)},
        }
        for place, each in enumerate(arguments)
    ]


def _split(prompt: str, whole: str) -> tuple[str, str]:
    """Splits a conversation where the answer begins: after the prompt, or as much of it as the template repeats."""
    place = _num_shared(prompt, whole)
    if place < len(prompt):
        begun = max(whole.rfind(opening, 0, place) for opening in _OPENINGS)
        if begun >= 0 and not re.search(r"[>\]]", whole[begun:place]):
            place = begun  # not within a tag
    return whole[:place], whole[place:]


def _num_shared(one: str, other: str) -> int:
    """Returns how many characters two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def _without_end(written: str, ending: str) -> str:
    """Removes the end of a turn; `ending` is what follows a text."""
    shared = written[len(written) - _num_shared(written[::-1], ending[::-1]) :]
    if shared.strip() and shared.lstrip()[0] not in _OPENINGS + "]":
        begun = re.search(f"[{re.escape(_OPENINGS)}]", shared)
        shared = shared[begun.start() :] if begun else ""
    return written[: len(written) - len(shared)]

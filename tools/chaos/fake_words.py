"""Turns the tokens of the fake engine into words, and for replies that call tools into reasoning and calls.

Everything here is a function of the tokens alone, fed one by one, as in the real engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock.engine.request import ToolCallDelta
from penstock.engine.text.response.call_ids import call_id

CALL = "Call "  # a prompt with this beginning gets a reply with reasoning and tool calls
_TURN = 7  # a token divisible by this ends the reasoning, begins a call, or ends one
_SYLLABLES = ("ba", "do", "fi", "gu", "ké", "lo", "mi", "nu", "pa", "ro", "si", "tu", "vä", "wo", "xi", "日")


def word(token: int) -> str:
    return " " + _SYLLABLES[token >> 8 & 15] + _SYLLABLES[token >> 4 & 15] + _SYLLABLES[token & 15]


@dataclass(frozen=True, slots=True)
class Said:
    """Content of some tokens."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def then(self, later: Said) -> Said:
        return Said(self.text + later.text, self.reasoning + later.reasoning, (*self.tool_calls, *later.tool_calls))


class Speech(Protocol):
    """Reads the tokens of one choice."""

    has_called: bool
    """Whether a tool call is complete."""

    def push(self, token: int) -> Said:
        """Returns what this token released."""

    def finish(self) -> Said:
        """Returns what was held back."""


def speech_of(prompt: Sequence[int], request_id: str, index: int, *, holds_back: bool) -> Speech:
    """Makes the speech of choice `index` of a request with this prompt.

    Args:
        prompt: its tokens.
        request_id: the ids of tool calls are made from it.
        index: the choice's.
        holds_back: delays text by one token, as if each word could begin a stop string.
    """
    if bytes(token & 255 for token in prompt[: len(CALL)]) == CALL.encode():
        return _Caller(request_id, index)
    return _Talker(holds_back)


def everything_said(speech: Speech, tokens: Iterable[int]) -> Said:
    """Returns what a whole reply says."""
    said = Said()
    for token in tokens:
        said = said.then(speech.push(token))
    return said.then(speech.finish())


class _Talker:
    has_called = False

    def __init__(self, holds_back: bool) -> None:
        self._holds_back = holds_back
        self._held = ""

    def push(self, token: int) -> Said:
        if not self._holds_back:
            return Said(word(token))
        text, self._held = self._held, word(token)
        return Said(text)

    def finish(self) -> Said:
        text, self._held = self._held, ""
        return Said(text)


class _Caller:
    """Reasons, then alternates between text and tool calls. Holds a word of reasoning back: it could begin the end."""

    def __init__(self, request_id: str, index: int) -> None:
        self.has_called = False
        self._request_id = request_id
        self._index = index
        self._mode: Literal["reasoning", "text", "call"] = "reasoning"
        self._num_calls = 0
        self._held = ""

    def push(self, token: int) -> Said:
        if token % _TURN == 0:
            return self._turn(token)
        if self._mode == "text":
            return Said(word(token))
        if self._mode == "call":
            return Said(tool_calls=(self._arguments(word(token)),))
        reasoning, self._held = self._held, word(token)
        return Said(reasoning=reasoning)

    def finish(self) -> Said:
        reasoning, self._held = self._held, ""
        return Said(reasoning=reasoning)

    def _turn(self, token: int) -> Said:
        if self._mode == "reasoning":
            self._mode = "text"
            return self.finish()
        if self._mode == "text":
            self._mode = "call"
            self._num_calls += 1
            id_ = call_id(self._request_id, self._index, self._num_calls - 1)
            return Said(tool_calls=(ToolCallDelta(self._num_calls - 1, '{"words":"', id_, f"tool_{token}"),))
        self._mode = "text"
        self.has_called = True
        return Said(tool_calls=(self._arguments('"}'),))

    def _arguments(self, text: str) -> ToolCallDelta:
        return ToolCallDelta(self._num_calls - 1, text)

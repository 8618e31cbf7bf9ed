"""The parts of a reply that a token released, and the collector of these parts."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.engine.request import ToolCallDelta

DELIMITER = re.compile("[\ud800-\udfff]")  # special tokens in text; no valid text has these characters


class ReplyEnd(enum.Enum):
    """How a reply ended, and so whether more would have followed."""

    ITSELF = "the model: what it began and left is what it wrote"
    STOPPED = "a stop string, which comes next in what the model wrote"
    CUT = "a limit, a deadline or the client"


class Delta(NamedTuple):
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


NOTHING = Delta("")


def joined(first: Delta, second: Delta) -> Delta:
    """Joins what two pushes released into one delta."""
    if second == NOTHING:
        return first
    calls = list(first.tool_calls)
    for call in second.tool_calls:
        add_call(calls, call)
    return Delta(first.text + second.text, first.reasoning + second.reasoning, tuple(calls))


def add_call(calls: list[ToolCallDelta], delta: ToolCallDelta) -> None:
    """Appends the next part of a call; parts of the same call are joined."""
    if calls and calls[-1].index == delta.index:
        begun = calls.pop()
        delta = ToolCallDelta(delta.index, begun.arguments + delta.arguments, begun.id, begun.name)
    calls.append(delta)


class Collector:
    """Collects the parts of one reply as they become certain.

    White space between parts belongs to none of them: it is held back until more of the same part follows.
    """

    def __init__(self, call_id: Callable[[int], str], spelled: Mapping[str, str]) -> None:
        """Starts empty. `call_id` names the call at an index; `spelled` has the text of delimiters to be shown."""
        self.num_calls = 0
        self.num_complete = 0
        self.num_mended = 0  # calls with a flaw that was mended
        self._is_mended = False
        self._call_id = call_id
        self._spelled = spelled
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._open_name: str | None = None  # of the call whose arguments continue
        self._space: list[str] = []  # trailing white space of the part so far
        self._is_behind_border = False  # whether only white space has come since the last border

    def text(self, text: str, *, is_last_part: bool = False) -> None:
        self._text.append(self._trimmed(text))
        if is_last_part:
            self.last_space(is_reasoning=False)

    def reasoning(self, text: str) -> None:
        self._reasoning.append(self._trimmed(text))

    def border(self) -> None:
        """Ends a part; another may begin."""
        self._open_name = None
        self._space = []
        self._is_behind_border = True

    def begin_call(self, name: str, *, is_mended: bool = False) -> None:
        self.border()
        self._is_mended = False
        index = self.num_calls
        self._calls.append(ToolCallDelta(index, "", self._call_id(index), name))
        self.num_calls += 1
        self._open_name = name
        if is_mended:
            self.mended()

    @property
    def is_open(self) -> bool:
        """Whether the newest call may still go on."""
        return self._open_name is not None

    def mended(self) -> None:
        """Notes that the newest call had a flaw."""
        self.num_mended += not self._is_mended
        self._is_mended = True

    def arguments(self, text: str) -> None:
        add_call(self._calls, ToolCallDelta(self.num_calls - 1, text))

    def end_call(self) -> None:
        self.num_complete += 1
        self._open_name = None

    def forget(self) -> None:
        """Drops what was collected and held back: it is the prompt's. A call that continues is the reply's first."""
        self.take()
        self._space = []
        self.num_calls = self.num_complete = self.num_mended = 0
        if self._open_name is not None:
            self.begin_call(self._open_name)

    def last_space(self, *, is_reasoning: bool) -> None:
        """Adds the white space held back to the last part, because nothing follows."""
        (self._reasoning if is_reasoning else self._text).extend(self._space)
        self._space = []

    def take(self) -> Delta:
        """Returns what was collected since the last call."""
        delta = Delta("".join(self._text), "".join(self._reasoning), tuple(self._calls))
        self._text, self._reasoning, self._calls = [], [], []
        return delta

    def _trimmed(self, text: str) -> str:
        if DELIMITER.search(text):
            text = DELIMITER.sub(lambda match: self._spelled.get(match[0], ""), text)
        if self._is_behind_border:
            text = text.lstrip()
            if not text:
                return ""
            self._is_behind_border = False
        trimmed = text.rstrip()
        if not trimmed:
            self._space.append(text)
            return ""
        before, self._space = self._space, [text[len(trimmed) :]]
        return "".join([*before, trimmed])

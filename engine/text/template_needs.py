"""Finds out by trial what input a chat template needs: templates do not say.

Four things differ between families. The arguments of a tool call are a mapping to most templates and JSON text to some.
Ids of tool calls are nine letters and digits to Mistral's templates, which refuse others; Kimi's show a call's function
as a part of the id alone. A message with only calls has no content to most, and an empty one to DeepSeek's. Content is
text to most, a list of parts to some, and either to others, which may depend on the role.

`bridges/history.py` asks for more: what a template makes of calls and results that are not as they should be.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeAlias

from penstock.engine.text.chat_template import accepted

Message: TypeAlias = Mapping[str, Any]

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_LONG_ID = "call_0123456789abcdef01234567"
_WORDS = ("penstock-a", "penstock-b")
_AS_DATA = re.compile(rf"""['"]text['"]: *['"]{_WORDS[0]}""")  # parts printed as data instead of being read
_ARGUMENTS = {"penstock": "probe"}
_CALLED = "penstock_called"
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"penstock": {"type": "string", "description": "A word."}}},
    },
}
_QUESTION = {"role": "user", "content": "Hi."}
_ANSWER = {"role": "assistant", "content": "Yes?"}
_CALL = {
    "role": "assistant",
    "tool_calls": [
        {"id": _LONG_ID, "type": "function", "function": {"name": _CALLED, "arguments": _ARGUMENTS}},
    ],
}
_RESULT = {"role": "tool", "content": "1", "name": "probe", "tool_call_id": _LONG_ID}
_CUT_OFF = '{"penstock": "penst'
_THOUGHT = dict.fromkeys(("reasoning", "thinking", "reasoning_content"), "penstock-thought")  # as templates name it


class CallIds(Enum):
    """The ids of calls that a template takes."""

    ANY = "any"
    SHORT = "nine letters and digits"
    NAMED = "functions.NAME:N, for the Nth call"


@dataclass(frozen=True, slots=True)
class CallShape:
    """The form of messages with tool calls that a template needs."""

    ids: CallIds = CallIds.ANY
    has_text_arguments: bool = False
    has_content: bool = False


_SHAPES = [CallShape(*wants) for wants in itertools.product((CallIds.ANY, CallIds.SHORT), (False, True), (False, True))]


class TemplateNeeds:
    """What one template needs; each fact is found out on first use, by rendering small conversations.

    It is the same on every worker. If a rendering takes too long, nothing is learnt, and the request that needed it is
    refused.

    Args:
        render: renders messages and tools; raises InvalidRequest if the template does not accept them.
    """

    def __init__(self, render: Callable[[Sequence[Message], Sequence[Message]], str]) -> None:
        self._render = render
        self._reads_parts: dict[str, bool] = {}
        self._reads_text: dict[str, bool] = {}

    @cached_property
    def calls(self) -> CallShape:
        """The first shape that the template accepts, or the plain one if it accepts none.

        If the template shows a call's function only as part of the id, ids contain the function's name.
        """
        shape, text = next(((shape, text) for shape in _SHAPES if (text := self._called(shape))), (_SHAPES[0], _CALLED))
        named = replace(shape, ids=CallIds.NAMED)
        return named if _CALLED not in text and _CALLED in (self._called(named) or "") else shape

    @cached_property
    def shows_calls(self) -> bool:
        """Whether a call reaches the prompt."""
        return self._renders(_exchange({"penstock": _WORDS[0]}), _WORDS[:1])

    @cached_property
    def shows_several_calls(self) -> bool:
        """Whether all calls of one message reach the prompt."""
        return self._renders(_exchange(*({"penstock": word} for word in _WORDS)), _WORDS)

    @cached_property
    def shows_call_texts(self) -> bool:
        """Whether text in the same message as a call reaches the prompt."""
        return self._shows_beside_call(content=_WORDS[1])

    @cached_property
    def shows_reasoned_call_texts(self) -> bool:
        """Whether such a text reaches the prompt if reasoning comes before it: a template may show only one of them."""
        return self._shows_beside_call(content=_WORDS[1], **_THOUGHT)

    def _shows_beside_call(self, **said: str) -> bool:
        call, result = _exchange({"penstock": _WORDS[0]})
        return self._renders([{**call, **said}, result], _WORDS)

    @cached_property
    def shows_broken_arguments(self) -> bool:
        """Whether arguments may be a text that is not JSON. It is shown as it is, or as a JSON string."""
        spellings = (_CUT_OFF, json.dumps(_CUT_OFF)[1:-1])
        return any(self._renders(_exchange(_CUT_OFF), [spelling]) for spelling in spellings)

    @cached_property
    def shows_results(self) -> bool:
        """Whether a result after its call reaches the prompt. The call is text if the template shows none."""
        if not self.shows_calls:
            return self.shows_lone_results
        return self._renders(_exchange(_ARGUMENTS, content=_WORDS[0]), _WORDS[:1])

    @cached_property
    def shows_lone_results(self) -> bool:
        """Whether a result without its call reaches the prompt."""
        return self._renders([_ANSWER, {**_RESULT, "content": _WORDS[0]}], _WORDS[:1])

    @cached_property
    def needs_result_names(self) -> bool:
        """Whether results need the names of their functions."""
        return self.shows_results and not self._renders(_exchange(_ARGUMENTS, name=None), ())

    @cached_property
    def needs_call_ids(self) -> bool:
        """Whether calls and results need ids."""
        if self.calls.ids is CallIds.NAMED:
            return True
        return self.shows_calls and not self._renders(_exchange(_ARGUMENTS, tool_call_id=None), ())

    @cached_property
    def _takes_questions(self) -> bool:
        return self._try([_QUESTION], []) is not None

    def reads_text(self, role: str) -> bool:
        """Whether content of this role may be text."""
        if role not in self._reads_text:
            self._reads_text[role] = self._shows(role, _WORDS[0], _WORDS[:1]) or not self.reads_parts(role)
        return self._reads_text[role]

    def reads_parts(self, role: str) -> bool:
        """Whether content of this role may be a list of parts."""
        if role not in self._reads_parts:
            parts = [{"type": "text", "text": word} for word in _WORDS]
            self._reads_parts[role] = self._shows(role, parts, _WORDS)
        return self._reads_parts[role]

    def _renders(self, messages: Sequence[Message], words: Sequence[str]) -> bool:
        """Whether the template takes these messages after a question, and shows the words.

        A template that takes no question counts as if it did: nothing can be found out about it.
        """
        if not self._takes_questions:
            return True
        made = with_calls((_QUESTION, *messages), self.calls)
        texts = (self._try(made, tools) for tools in ([_TOOL], []))  # a template may not take this tool
        return any(text is not None and all(word in text for word in words) for text in texts)

    def _called(self, shape: CallShape) -> str | None:
        """Renders a call in this shape; None if the template refuses it."""
        text = self._try(with_calls((_QUESTION, _CALL, _RESULT), shape), [_TOOL])
        return None if text is None or repr(_ARGUMENTS) in text else text

    def _shows(self, role: str, content: object, words: Sequence[str]) -> bool:
        text = self._try(self._conversation(role, content), [])
        return text is not None and all(word in text for word in words) and _AS_DATA.search(text) is None

    def _conversation(self, role: str, content: object) -> Sequence[Message]:
        message = {"role": role, "content": content}
        if role == "user":
            return [message]
        if role == "assistant":
            return [_QUESTION, message, _QUESTION]
        if role == "tool":
            return with_calls((_QUESTION, _CALL, {**_RESULT, **message}), self.calls)
        return [message, _QUESTION]

    def _try(self, messages: Sequence[Message], tools: Sequence[Message]) -> str | None:
        return accepted(lambda: self._render(messages, tools))


def shaped(messages: Sequence[Message], needs: TemplateNeeds) -> list[dict[str, Any]]:
    """Returns the messages in the form that the template needs, without null fields."""
    made = [_with_content(message, needs) for message in messages]
    if any("tool_calls" in message or "tool_call_id" in message for message in made):
        made = with_calls(made, needs.calls)
    return made


def with_calls(messages: Sequence[Message], shape: CallShape) -> list[dict[str, Any]]:
    """Returns messages with their calls, and the ids of calls that they answer, in this shape."""
    shaper = _Shaper(shape)
    return [shaper.message(message) for message in messages]


@dataclass(slots=True)
class _Shaper:
    """Brings the messages of one conversation into shape, one after the other."""

    shape: CallShape
    num_calls: int = 0
    named: dict[str, str] = field(default_factory=dict)  # ids with the names of functions, by the ids before

    def message(self, message: Message) -> dict[str, Any]:
        made = dict(message)
        if "tool_calls" in made:
            made["tool_calls"] = [self._call(call) for call in made["tool_calls"]]
            if self.shape.has_content:
                made.setdefault("content", "")
        if "tool_call_id" in made:
            made["tool_call_id"] = self._id(made["tool_call_id"])
        return made

    def _call(self, call: Message) -> dict[str, Any]:
        function = call["function"]
        made = dict(call)
        if self.shape.ids is CallIds.NAMED:
            self.named[call.get("id", "")] = f"functions.{function['name']}:{self.num_calls}"
            made.setdefault("id", "")
        self.num_calls += 1
        if "id" in made:
            made["id"] = self._id(made["id"])
        if self.shape.has_text_arguments and not isinstance(function["arguments"], str):
            made["function"] = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        return made

    def _id(self, id_: str) -> str:
        return short_id(id_) if self.shape.ids is CallIds.SHORT else self.named.get(id_, id_)


def short_id(call_id: str) -> str:
    """Returns nine letters and digits that stand for this id: the id itself if it has that form."""
    return call_id if _SHORT_ID.fullmatch(call_id) else blake2b(call_id.encode(), digest_size=8).hexdigest()[:9]


def _exchange(*arguments: object, **result: object) -> list[Message]:
    """Returns a message with calls that have these arguments, and their results. A field that is None is left out, and
    the calls have no ids if the results have none.
    """
    calls, results = [], []
    for number, values in enumerate(arguments):
        made = {**_RESULT, "tool_call_id": f"{_LONG_ID[:-1]}{number}", **result}
        results.append(_given(made))
        call = {"type": "function", "function": {"name": "probe", "arguments": values}}
        calls.append(_given({"id": made["tool_call_id"], **call}))
    return [{"role": "assistant", "tool_calls": calls}, *results]


def _given(values: Message) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _with_content(message: Message, needs: TemplateNeeds) -> dict[str, Any]:
    made = _given(message)
    content, role = made.get("content"), made["role"]
    if isinstance(content, str):
        if not needs.reads_text(role):
            made["content"] = [{"type": "text", "text": content}]
    elif content is not None and not needs.reads_parts(role):
        made["content"] = "\n".join(part["text"] for part in content)
    return made

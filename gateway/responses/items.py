"""Input items of a response, which become messages of a chat."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from penstock.gateway.common.documents import Document
from penstock.gateway.common.fields import Body, Policy, read_fields
from penstock.gateway.common.turns import spoken
from penstock.gateway.errors import ApiError
from penstock.gateway.http.passed_over import is_strict, pass_over
from penstock.gateway.responses.tools import INPUT, full_name
from penstock.protocol.wire.values import spelled

MAX_ITEMS = 4096

_TEXT_OF_PARTS: Mapping[str, str] = {
    **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text"),
    "refusal": "refusal",
}
_IGNORED_IN_PARTS = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})
_IGNORED_IN_ITEMS: Mapping[str, str] = {
    "status": "an item is given as a whole",
    "phase": "templates know no phases of an answer",
    "caller": "functions are called by the model alone",
    "created_by": "it says nothing to the model",
    "encrypted_content": "reasoning is given in plain",
}


def _texts(value: object) -> object:
    """Returns a content as the texts of its parts."""
    if isinstance(value, str):
        return [value]
    return [_text(part) for part in value] if isinstance(value, list) else value


def _text(part: object) -> object:
    if not isinstance(part, dict):
        raise ValueError("a part of a content must be an object")  # noqa: TRY004  pydantic takes no other
    kind = part.get("type")
    name = _TEXT_OF_PARTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise ValueError(f"a part of type {spelled(kind)} is not supported, only text")
    for each in part.keys() - {"type", name}:
        if is_strict() and each not in _IGNORED_IN_PARTS:
            raise ValueError(f"a part of type {kind} has no field {each!r:.80}")
        if part[each]:
            pass_over(f"input.content.{each}")
    return part.get(name)


_Texts = Annotated[list[str], BeforeValidator(_texts)]


class InputItem(Body, ABC):
    """An input item. `id` is the one that it had in an earlier answer, if it comes from one."""

    id: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    prefix: ClassVar[str]  # of ids that items get here

    @abstractmethod
    def shown(self) -> Document:
        """Returns the item without its id, as GET .../input_items shows it, and as it can be sent again."""

    @abstractmethod
    def add_to(self, messages: list[Document]) -> None:
        """Adds the item after the messages of earlier items."""


class MessageItem(InputItem):
    """A message and its role."""

    prefix: ClassVar[str] = "msg"

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Texts

    @model_validator(mode="before")
    @classmethod
    def _may_be_silent(cls, values: object) -> object:
        return spoken(values)

    def shown(self) -> Document:
        if self.role == "assistant":
            content: list[Document] = [
                {"type": "output_text", "text": text, "annotations": []} for text in self.content
            ]
        else:
            content = _parts("input_text", self.content)
        return {"type": self.type, "role": self.role, "status": "completed", "content": content}

    def add_to(self, messages: list[Document]) -> None:
        if self.role != "assistant":
            messages.append({"role": self.role, "content": _content(self.content)})
            return
        turn = _turn(messages, ends_with=("content", "tool_calls"))
        turn["content"] = "".join(self.content)


class ReasoningItem(InputItem):
    """The assistant's reasoning. If it has only another server's encrypted content, it is empty."""

    prefix: ClassVar[str] = "rs"

    type: Literal["reasoning"]
    summary: _Texts = Field(default_factory=list)
    content: _Texts = Field(default_factory=list)

    def shown(self) -> Document:
        summary, content = _parts("summary_text", self.summary), _parts("reasoning_text", self.content)
        return {"type": self.type, "status": "completed", "summary": summary, "content": content}

    def add_to(self, messages: list[Document]) -> None:
        text = "".join(self.content) or "\n\n".join(self.summary)
        if text:
            turn = _turn(messages, ends_with=("reasoning", "content", "tool_calls"))
            turn["reasoning"] = text


class FunctionCallItem(InputItem):
    """A function call by the assistant."""

    prefix: ClassVar[str] = "fc"

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = "{}"

    def shown(self) -> Document:
        return {**self.model_dump(exclude={"id"}, exclude_none=True), "status": "completed"}

    def add_to(self, messages: list[Document]) -> None:
        function = {"name": full_name(self.name, self.namespace), "arguments": self.arguments}
        calls = _turn(messages, ends_with=()).setdefault("tool_calls", [])
        calls.append({"id": self.call_id, "type": "function", "function": function})


class CustomCallItem(InputItem):
    """A call of a custom tool by the assistant."""

    prefix: ClassVar[str] = "ctc"

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str

    def shown(self) -> Document:
        return {**self.model_dump(exclude={"id"}, exclude_none=True), "status": "completed"}

    def add_to(self, messages: list[Document]) -> None:
        arguments = json.dumps({INPUT: self.input}, ensure_ascii=False)
        FunctionCallItem(
            type="function_call", call_id=self.call_id, name=self.name, namespace=self.namespace, arguments=arguments
        ).add_to(messages)


class FunctionCallOutputItem(InputItem):
    """The output of a function, or of a custom tool."""

    prefix: ClassVar[str] = "fco"

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: _Texts = Field(default_factory=list)

    def shown(self) -> Document:
        output = self.output[0] if len(self.output) == 1 else _parts("input_text", self.output)
        return {"type": self.type, "call_id": self.call_id, "output": output, "status": "completed"}

    def add_to(self, messages: list[Document]) -> None:
        messages.append({"role": "tool", "content": _content(self.output), "tool_call_id": self.call_id})


_KINDS: Mapping[str, type[InputItem]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": FunctionCallOutputItem,
}
_POLICIES: Mapping[type[InputItem], Policy] = {
    model: Policy(frozenset(model.model_fields), _IGNORED_IN_ITEMS, unknown="passed") for model in _KINDS.values()
}


def read_items(value: object) -> list[InputItem]:
    """Reads `input` of a request, or the items in a record.

    Raises:
        ApiError: naming what is wrong.
    """
    if isinstance(value, str):
        return [MessageItem.model_validate({"role": "user", "content": value})]
    if not isinstance(value, list):
        raise ApiError(400, "input: must be a text or a list of items", param="input", code="invalid_type")
    if len(value) > MAX_ITEMS:
        raise ApiError(400, f"input: has {len(value)} items, the limit is {MAX_ITEMS}", param="input")
    return [_read_item(f"input[{place}]", item) for place, item in enumerate(value)]


def _read_item(place: str, value: object) -> InputItem:
    if not isinstance(value, dict):
        raise ApiError(400, f"{place}: must be an object", param=place, code="invalid_type")
    kind = value.get("type") or "message"
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        message = f"{place}: items of type {spelled(kind)} are not supported, only {', '.join(_KINDS)}"
        raise ApiError(400, message, param=f"{place}.type", code="unsupported_value")
    return read_fields(_POLICIES[model], model, value, place)


def shown_items(items: Iterable[InputItem], request_id: str) -> list[Document]:
    """Returns items in the form in which they are stored. An item without an id gets one from its place."""
    return [
        {"id": item.id or f"{item.prefix}_{request_id}_in{place}", **item.shown()} for place, item in enumerate(items)
    ]


def to_messages(items: Iterable[InputItem]) -> list[Document]:
    """Converts items to messages. Consecutive reasoning, text and calls are one turn of the assistant: one message."""
    messages: list[Document] = []
    for item in items:
        item.add_to(messages)
    return messages


def _turn(messages: list[Document], ends_with: Sequence[str]) -> Document:
    """Returns the assistant's current turn; a new one if there is none, or if it has one of `ends_with` already."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in ends_with):
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(texts: Sequence[str]) -> str | list[Document]:
    return texts[0] if len(texts) == 1 else _parts("text", texts)


def _parts(kind: str, texts: Sequence[str]) -> list[Document]:
    return [{"type": kind, "text": text} for text in texts]

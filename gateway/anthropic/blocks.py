"""Converts messages of content blocks to the messages of a chat.

A user's turn with tool results becomes several messages, and consecutive turns of one role become one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.gateway.anthropic.fields import read_at, wrong
from penstock.gateway.common.documents import Document
from penstock.gateway.common.fields import CACHED, Body, Policy, Refusal
from penstock.gateway.common.near import nearest
from penstock.gateway.common.turns import spoken
from penstock.gateway.http.passed_over import pass_over
from penstock.protocol.wire.values import spelled

MAX_MESSAGES = 4096
MAX_BLOCKS = 8192
"""Limit on the blocks of one request: checking one holds up everything else."""


class ContentBlock(Body, ABC):
    """A part of a message's content."""

    @abstractmethod
    def add_to(self, messages: list[Document], role: str, place: str) -> None:
        """Adds the block after the messages so far. `place` is its position, for errors.

        Raises:
            ApiError: the block is wrong; the error names the place.
        """


class TextBlock(ContentBlock):
    type: Literal["text"]
    text: str

    def add_to(self, messages: list[Document], role: str, place: str) -> None:
        _turn(messages, role)["content"].append(_part(self.text))


class ThinkingBlock(ContentBlock):
    """A thinking block. Its signature is ignored: anybody may state what the assistant thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None

    def add_to(self, messages: list[Document], role: str, place: str) -> None:
        turn = _turn(messages, role)
        before = turn.get("reasoning")
        turn["reasoning"] = self.thinking if before is None else f"{before}\n\n{self.thinking}"


class RedactedThinkingBlock(ContentBlock):
    """Encrypted reasoning of another server's model, which is skipped."""

    type: Literal["redacted_thinking"]
    data: str

    def add_to(self, messages: list[Document], role: str, place: str) -> None:
        _turn(messages, role)


class ToolUseBlock(ContentBlock):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Any = Field(default_factory=dict)

    def add_to(self, messages: list[Document], role: str, place: str) -> None:
        function = {"name": self.name, "arguments": self.input}
        calls = _turn(messages, role).setdefault("tool_calls", [])
        calls.append({"id": self.id, "type": "function", "function": function})


class ToolReferenceBlock(ContentBlock):
    """A tool that a search has found. The model is shown all tools, so the name is enough."""

    type: Literal["tool_reference"]
    tool_name: str

    def add_to(self, messages: list[Document], role: str, place: str) -> None:
        _turn(messages, role)["content"].append(_part(self.tool_name))


class ToolResultBlock(ContentBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Any = ""

    def add_to(self, messages: list[Document], role: str, place: str) -> None:
        result: Document = {"role": "tool", "content": [], "tool_call_id": self.tool_use_id}
        messages.append(result)
        _add(messages, "tool", f"{place}.content", self.content, _RESULT)


class CompactionBlock(ContentBlock):
    """A server's summary of earlier turns. It has no content if the server failed."""

    type: Literal["compaction"]
    content: str | None = None

    def add_to(self, messages: list[Document], role: str, place: str) -> None:
        _turn(messages, role)["content"].append(_part(self.content or ""))


class DocumentSource(Body):
    """`source` of a document. What a server would have to fetch or to convert is not text."""

    type: Literal["text", "content"]
    media_type: str | None = None
    data: str | None = None
    content: Any = None


class DocumentBlock(ContentBlock):
    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None

    def add_to(self, messages: list[Document], role: str, place: str) -> None:
        text = self.source.data if self.source.type == "text" else self.source.content
        _quote(messages, role, f"{place}.source", (self.title, self.context), text)


class SearchResultBlock(ContentBlock):
    type: Literal["search_result"]
    source: str
    title: str | None = None
    content: Any

    def add_to(self, messages: list[Document], role: str, place: str) -> None:
        _quote(messages, role, f"{place}.content", (self.title, self.source), self.content)


class MessageTurn(Body):
    """An element of `messages`."""

    role: Literal["user", "assistant", "system"]
    content: Any

    @model_validator(mode="before")
    @classmethod
    def _may_be_silent(cls, values: object) -> object:
        return spoken(values)


def _policy(kind: type[Body], **ignored: str) -> Policy:
    refused = {"citations": Refusal("sources are not cited", ([], {"enabled": False}))}
    return Policy(frozenset(kind.model_fields), {"cache_control": CACHED, **ignored}, refused, unknown="passed")


_NO_TOOLSET = "tools are functions that the client runs"
_Kinds = Mapping[str, tuple[type[ContentBlock], Policy]]

_SAID_BESIDE = {"cache_control": CACHED, "citations": "the model is shown the text that cites"}
_TEXT: _Kinds = {"text": (TextBlock, _policy(TextBlock))}
_QUOTED: _Kinds = {
    **_TEXT,
    "document": (DocumentBlock, _policy(DocumentBlock)),
    "search_result": (SearchResultBlock, _policy(SearchResultBlock)),
}
_RESULT: _Kinds = {**_QUOTED, "tool_reference": (ToolReferenceBlock, _policy(ToolReferenceBlock))}
_KINDS: Mapping[str, _Kinds] = {
    "system": _TEXT,
    "user": {
        **_QUOTED,
        "tool_result": (
            ToolResultBlock,
            _policy(
                ToolResultBlock,
                is_error="templates know no failed calls: the content says it",
                toolset_name=_NO_TOOLSET,
            ),
        ),
    },
    "assistant": {
        "text": (TextBlock, Policy(_TEXT["text"][1].honoured, _SAID_BESIDE, unknown="passed")),
        "thinking": (ThinkingBlock, _policy(ThinkingBlock)),
        "redacted_thinking": (RedactedThinkingBlock, _policy(RedactedThinkingBlock)),
        "compaction": (CompactionBlock, _policy(CompactionBlock)),
        "tool_use": (ToolUseBlock, _policy(ToolUseBlock, caller=_NO_TOOLSET, toolset_name=_NO_TOOLSET)),
    },
}
_TURN = _policy(MessageTurn)


def to_messages(system: object, turns: list[dict[str, Any]]) -> list[Document]:
    """Converts a system prompt and turns to messages.

    Raises:
        ApiError: naming what is wrong.
    """
    _check_size(turns)
    messages: list[Document] = []
    if system is not None:
        _add(messages, "system", "system", system, _TEXT)
    for number, value in enumerate(turns):
        place = f"messages[{number}]"
        turn = read_at(place, _TURN, MessageTurn, value)
        _add(messages, turn.role, f"{place}.content", turn.content, _KINDS[turn.role])
    return [_finished(message) for message in messages]


def _check_size(turns: list[dict[str, Any]]) -> None:
    if len(turns) > MAX_MESSAGES:
        raise wrong("messages", f"has {len(turns)} messages, the limit is {MAX_MESSAGES}")
    contents = [turn.get("content") for turn in turns]
    num_blocks = sum(len(content) for content in contents if isinstance(content, list))
    if num_blocks > MAX_BLOCKS:
        raise wrong("messages", f"has {num_blocks} blocks, the limit is {MAX_BLOCKS}")


def _add(messages: list[Document], role: str, place: str, content: object, kinds: _Kinds) -> None:
    if isinstance(content, str):
        _turn(messages, role)["content"].append(_part(content))
        return
    if not isinstance(content, list):
        raise wrong(place, "must be a text or a list of blocks", "invalid_type")
    if len(content) > MAX_BLOCKS:
        raise wrong(place, f"has {len(content)} blocks, the limit is {MAX_BLOCKS}")
    for number, value in enumerate(content):
        if role == "assistant" and _is_of_server(value):
            _turn(messages, role)
            pass_over(f"{place}.{value['type']}")
            continue
        _read_block(f"{place}[{number}]", value, kinds).add_to(messages, role, f"{place}[{number}]")


_GIVEN = frozenset({"image", "container_upload", *_KINDS["user"]})
"""Kinds of blocks with content for the model in turns of other roles: they are not a server's own blocks."""


def _is_of_server(value: object) -> bool:
    """Whether a block of the assistant's turn is a server's own, such as a call of a tool that it has run, or that
    call's result. No template has a place for them.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    known = _KINDS["assistant"]
    return isinstance(kind, str) and kind not in known and kind not in _GIVEN and nearest(kind, known) is None


def _quote(messages: list[Document], role: str, place: str, heads: Iterable[str | None], content: object) -> None:
    """Adds a text from elsewhere, preceded by its source."""
    _turn(messages, role)["content"].extend(_part(f"{head}\n\n") for head in heads if head)
    _add(messages, role, place, content, _TEXT)


def _read_block(place: str, value: object, kinds: _Kinds) -> ContentBlock:
    kind = value.get("type") if isinstance(value, dict) else None
    found = kinds.get(kind) if isinstance(kind, str) else None
    if isinstance(value, dict) and found is None:
        message = f"blocks of type {spelled(kind)} are not supported here, only {', '.join(kinds)}"
        raise wrong(f"{place}.type", message, "unsupported_value")
    model, policy = found or _TEXT["text"]
    return read_at(place, policy, model, value)


def _turn(messages: list[Document], role: str) -> Document:
    """Returns the last message if it has that role; else a new one."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    return messages[-1]


def _part(text: str) -> Document:
    return {"type": "text", "text": text}


def _finished(message: Document) -> Document:
    """Returns a message with content as templates expect it: an assistant's text is one string, and may be missing
    beside calls.
    """
    texts = [part["text"] for part in message["content"]]
    if message["role"] != "assistant":
        return message if len(texts) > 1 else {**message, "content": "".join(texts)}
    if texts or not message.get("tool_calls"):
        return {**message, "content": "".join(texts)}
    return {name: value for name, value in message.items() if name != "content"}

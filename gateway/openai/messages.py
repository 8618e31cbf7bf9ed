"""Cleans messages from clients of fields that servers once added, or that are meant for other servers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

_PLAIN = frozenset({"role", "content"})
_CACHE = "cache_control"
"""Marks the end of the prefix to cache. It is ignored, as every prompt is cached anyway."""

# Assistants' messages come back as clients keep them, with whatever their server or a library has added. A field that
# holds part of the answer is left in, so that the wire refuses it.
# holds a part of what was said is left in, so that the wire refuses it.
_OF_ASSISTANT = frozenset(
    {"role", "content", "name", "reasoning", "reasoning_content", "tool_calls", "audio", "function_call"}
)
_OF_CALL = frozenset({"id", "type", "function", "custom"})
_OF_FUNCTION = frozenset({"name", "arguments"})


def clean(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages in the wire's form. Errors are left in: the wire reports them."""
    return [message if _is_plain(message) else _cleaned(message) for message in messages]


def _is_plain(message: Mapping[str, Any]) -> bool:
    return message.keys() == _PLAIN and isinstance(message["content"], str)


def _cleaned(message: Mapping[str, Any]) -> dict[str, Any]:
    is_said = message.get("role") == "assistant"
    made = {name: value for name, value in message.items() if value is not None and name != _CACHE}
    if is_said:
        made = _only(made, _OF_ASSISTANT)
    content = made.get("content", message.get("refusal") if is_said else None)
    if isinstance(content, list):
        content = [_cleaned_part(part) for part in content] or ""
    if content is not None:
        made["content"] = content
    if isinstance(made.get("tool_calls"), list):
        made["tool_calls"] = [_cleaned_call(call) for call in made["tool_calls"]]
    return made


def _cleaned_part(part: object) -> object:
    """Cleans a part. A refusal is the assistant's text; the wire has no other kinds of text."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return {name: value for name, value in part.items() if name not in (_CACHE, "annotations")}


def _cleaned_call(call: object) -> object:
    """Cleans a call. One assembled from a stream still has the stream's `index`."""
    if not isinstance(call, dict):
        return call
    made = _only(call, _OF_CALL)
    if isinstance(made.get("function"), dict):
        made["function"] = _only(made["function"], _OF_FUNCTION)
    return made


def _only(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}

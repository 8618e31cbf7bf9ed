"""Messages as clients send them: with what a server once gave them, and what is meant for other servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

IGNORED_IN_MESSAGES: Mapping[str, str] = {
    "annotations": "sources of an earlier answer are no part of the chat",
    "cache_control": "every prompt's prefix is cached as it is",
    "refusal": "stands for the content where there is none",
}

_PLAIN = frozenset({"role", "content"})


def clean(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the wire has them. What is wrong with them is left in: the wire says so."""
    return [message if _is_plain(message) else _cleaned(message) for message in messages]


def _is_plain(message: Mapping[str, Any]) -> bool:
    return message.keys() == _PLAIN and isinstance(message["content"], str)


def _cleaned(message: Mapping[str, Any]) -> dict[str, Any]:
    made = {name: value for name, value in message.items() if value is not None and name not in IGNORED_IN_MESSAGES}
    content = made.get("content", message.get("refusal"))
    if isinstance(content, list):
        content = [_cleaned_part(part) for part in content] or ""
    if content is not None:
        made["content"] = content
    if "tool_calls" in made:
        made["tool_calls"] = _cleaned_calls(made["tool_calls"])
    return made


def _cleaned_part(part: object) -> object:
    """A refusal is what the assistant said; the wire has no other kinds of text."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return {name: value for name, value in part.items() if name not in IGNORED_IN_MESSAGES}


def _cleaned_calls(calls: object) -> object:
    """Calls put together from a stream still have the `index` that they had there."""
    if not isinstance(calls, list):
        return calls
    return [
        {name: value for name, value in call.items() if name != "index"} if isinstance(call, dict) else call
        for call in calls
    ]

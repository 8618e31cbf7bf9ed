"""Cleans messages from clients of fields that servers once added, or that are meant for other servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.gateway.common.fields import CACHED, Policy, Refusal
from penstock.gateway.common.turns import custom_arguments

_PLAIN = frozenset({"role", "content"})
_CACHE = {"cache_control": CACHED}
_TEXT_OF_PARTS: Mapping[object, str] = {"text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_OF_PARTS: Mapping[object, str] = {"reasoning": "text", "thinking": "thinking"}

_PART = Policy(frozenset({"type", "text", "refusal", "thinking"}), _CACHE, unknown="passed")
_MESSAGE = Policy(
    frozenset({"role", "content", "name", "reasoning", "reasoning_content", "tool_calls", "tool_call_id"}),
    _CACHE,
    inner={"content": _PART},
    unknown="passed",
)
_FUNCTION = Policy(frozenset({"name", "arguments"}), unknown="left_out")
_CALL = Policy(frozenset({"id", "type", "function", "custom"}), inner={"function": _FUNCTION}, unknown="left_out")
_SAID = Policy(
    frozenset({"role", "content", "name", "reasoning", "reasoning_content", "tool_calls", "function_call", "refusal"}),
    _CACHE,
    refused={"audio": Refusal("contents are text")},
    inner={"content": _PART, "tool_calls": _CALL, "function_call": _FUNCTION},
    unknown="left_out",
)
"""An assistant's message comes back as its client keeps it, with whatever its server or a library has added. What holds
a part of what was said is honoured or refused.
"""


def clean(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages in the wire's form. Wrong values are left in: the wire reports them.

    Raises:
        ApiError: a field is refused.
    """
    return [
        message if _is_plain(message) else _cleaned(message, f"messages[{number}]")
        for number, message in enumerate(messages)
    ]


def _is_plain(message: Mapping[str, Any]) -> bool:
    return message.keys() == _PLAIN and isinstance(message["content"], str)


def _cleaned(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    made = (_SAID if message.get("role") == "assistant" else _MESSAGE).honoured_of(message, place)
    refusal = made.pop("refusal", None)
    content = made.get("content", refusal)
    if isinstance(content, list):
        if thoughts := [part[_REASONING_OF_PARTS[part["type"]]] for part in content if _is_thought(part)]:
            made.setdefault("reasoning", "\n\n".join(thoughts))
        content = [_cleaned_part(part) for part in content if not _is_thought(part)] or ""
    if content is not None:
        made["content"] = content
    return _without_functions(made)


def _without_functions(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose calls or result, such as an older `function_call`, are turned into those of tools."""
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_function_call(call) for call in calls]
    if (call := message.pop("function_call", None)) is not None:
        message.setdefault("tool_calls", [{"type": "function", "function": call}])
    return message | {"role": "tool"} if message.get("role") == "function" else message


def _function_call(call: object) -> object:
    """Returns a call as the call of a function. A custom tool's call becomes one with a single text as argument."""
    custom = call.get("custom") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(custom, dict):
        return call
    function = {"name": custom.get("name"), "arguments": custom_arguments(custom.get("input"))}
    return {"id": call.get("id"), "type": "function", "function": function}


def _is_thought(part: object) -> bool:
    """Whether a part is reasoning, which has a place of its own in a message."""
    name = _REASONING_OF_PARTS.get(_kind_of(part))
    return name is not None and isinstance(part, dict) and isinstance(part.get(name), str)


def _cleaned_part(part: object) -> object:
    """Cleans a part. The wire has one kind of text."""
    name = _TEXT_OF_PARTS.get(_kind_of(part))
    if name is None or not isinstance(part, dict):
        return part
    return {"type": "text", **({"text": part[name]} if name in part else {})}


def _kind_of(part: object) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None

"""The body of a message, and the parts that events share with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from penstock.gateway.common.documents import Document, check_ended
from penstock.producer import Choice, Reply, Usage

NO_USAGE = Usage(0, 0, 0)
"""Usage before the end: a worker counts the prompt's tokens, and reports them with the end."""


def message_id(request_id: str) -> str:
    return f"msg_{request_id}"


def message(reply: Reply, model: str, *, shows_thinking: bool) -> Document:
    """Returns the body of a reply.

    Raises:
        ApiError: it was cancelled, or expired.
    """
    check_ended(reply)
    choice = reply.choices[0]
    id_ = message_id(reply.request_id)
    content = list(_blocks(choice, signature=id_, shows_thinking=shows_thinking))
    return {**_frame(id_, model, reply.usage), "content": content, **ending(choice)}


def opened(id_: str, model: str) -> Document:
    """Returns a message at its beginning."""
    return {**_frame(id_, model, NO_USAGE), "content": [], "stop_reason": None, "stop_sequence": None}


def ending(choice: Choice) -> Document:
    """Returns the reason why a message ended."""
    stop_sequence = choice.stop_reason if isinstance(choice.stop_reason, str) else None
    if choice.finish_reason == "stop":
        return {"stop_reason": "end_turn" if stop_sequence is None else "stop_sequence", "stop_sequence": stop_sequence}
    return {"stop_reason": "tool_use" if choice.finish_reason == "tool_calls" else "max_tokens", "stop_sequence": None}


def usage(usage: Usage) -> Document:
    """Returns the usage. Anthropic counts cached tokens apart from `input_tokens`."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _frame(id_: str, model: str, count: Usage) -> Document:
    return {"id": id_, "type": "message", "role": "assistant", "model": model, "usage": usage(count)}


def _blocks(choice: Choice, *, signature: str, shows_thinking: bool) -> Iterator[Document]:
    if choice.reasoning and shows_thinking:
        yield {"type": "thinking", "thinking": choice.reasoning, "signature": signature}
    if choice.text:
        yield {"type": "text", "text": choice.text}
    for call in choice.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}


def _input(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call, as far as they go if it was cut off."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}

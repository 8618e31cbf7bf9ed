"""Values that callers get back."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.protocol.reply import Choice, Chunk, Reply, Timings, ToolCall, Usage


def test_a_reply_s_text_and_tokens_are_those_of_its_first_choice() -> None:
    choices = (Choice(0, "a", (1,), None, "stop"), Choice(1, "bc", (2, 3), None, "length"))
    reply = Reply("r", "length", choices, Usage(4, 2, 3), Timings(1, 2, 3))
    assert (reply.text, reply.tokens) == ("a", (1,))


def test_a_reply_is_a_message_of_the_next_request() -> None:
    call = ToolCall("call_1", "f", '{"x": 1}')
    choice = Choice(0, "a", (1,), None, "tool_calls", "hm", (call,))
    reply = Reply("r", "tool_calls", (choice,), Usage(4, 2, 3), Timings(1, 2, 3))
    assert (reply.reasoning, reply.tool_calls) == ("hm", (call,))
    assert reply.message == {
        "role": "assistant",
        "content": "a",
        "reasoning": "hm",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
    }
    assert Choice(0, "a", (1,), None, "stop").message == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("kind", [Chunk, Choice, ToolCall, Usage, Timings, Reply])
def test_values_can_be_kept_and_compared(kind: type) -> None:
    """Values are frozen, so that one given to a callback cannot be changed behind another's back."""
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert not hasattr(Usage(1, 2, 3), "__dict__")

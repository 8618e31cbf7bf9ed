"""Turns of a conversation as they come back, whatever an answer was."""

from __future__ import annotations

import json

CUSTOM_INPUT = "input"
"""The argument of the function that a custom tool becomes, whose calls have one text."""


def custom_arguments(text: object) -> str:
    """Returns the arguments of that function."""
    return json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)


def spoken(turn: object) -> object:
    """Returns a turn with a content if it is the assistant's and has none: an answer may be empty."""
    if isinstance(turn, dict) and turn.get("role") == "assistant" and turn.get("content") is None:
        return {**turn, "content": []}
    return turn

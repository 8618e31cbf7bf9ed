"""Turns of a conversation as they come back, whatever an answer was."""

from __future__ import annotations


def spoken(turn: object) -> object:
    """Returns a turn with a content if it is the assistant's and has none: an answer may be empty."""
    if isinstance(turn, dict) and turn.get("role") == "assistant" and turn.get("content") is None:
        return {**turn, "content": []}
    return turn

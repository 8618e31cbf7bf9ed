"""Makes turns that a template accepts: they alternate, or none of their contents is empty."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.engine.text.bridges.instructions import INSTRUCTIONS, text_of
from penstock.engine.text.bridges.probe import Message, Probe, conversation, kind_of

FILLER = "(continued)"
"""Content of a turn that only separates two others."""
EMPTY = "(empty)"
"""Content of a message that has none, where the template refuses such a message."""

_NOBODY = "nobody"  # stands for the last speaker in a conversation without any user

# For each order of turns: a conversation that has it, and its replacement if the template refuses that conversation.
# Calls and results stand between spoken turns, so what may follow a result depends on who spoke before the calls.
_MERGED = {
    ("user", "user"): (("user", "user"), ("user",)),
    ("assistant", "assistant"): (("user", "assistant", "assistant", "user"), ("user", "assistant", "user")),
    ("assistant", "call"): (("user", "assistant", "call", "tool"), ("user", "call", "tool")),
}
_PARTED = {
    ("", "", "assistant"): (("assistant", "user"), ("user", "assistant", "user")),
    ("", "", "call"): (("call", "tool", "user"), ("user", "call", "tool")),
    (_NOBODY, "", "assistant"): (("assistant",), ("user", "assistant")),
    (_NOBODY, "", "call"): (("call", "tool"), ("user", "call", "tool")),
    ("", "tool", "assistant"): (("call", "tool", "assistant"), ("call", "tool", "user", "assistant")),
    (_NOBODY, "tool", "assistant"): (("call", "tool", "assistant"), ("call", "tool", "user", "assistant")),
    ("user", "tool", "user"): (("user", "call", "tool", "user"), ("user", "call", "tool", "assistant", "user")),
    ("assistant", "tool", "assistant"): (
        ("user", "assistant", "call", "tool", "assistant"),
        ("user", "assistant", "call", "tool", "user", "assistant"),
    ),
}
_SPOKEN = {
    "system": ("system", "user"),
    "user": ("user",),
    "assistant": ("user", "assistant", "user"),
    "tool": ("user", "call", "tool"),
}


class Turns:
    """What turns one template accepts."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._refuses_empty: dict[str, bool] = {}

    def alternated(self, messages: Sequence[Message], *, tools: bool) -> list[Message]:
        """Returns the messages with those merged that the template does not take one after the other, and with a
        filler between those that cannot be merged.
        """
        made: list[Message] = []
        before, spoken = "", "" if any(message["role"] == "user" for message in messages) else _NOBODY
        for message in messages:
            kind = kind_of(message)
            if (before, kind) in _MERGED and self._parts(*_MERGED[before, kind], tools=tools):
                made[-1] = _merged(made[-1], message)
            else:
                if (spoken, before, kind) in _PARTED and self._parts(*_PARTED[spoken, before, kind], tools=tools):
                    spoken = "assistant" if kind == "user" else "user"
                    made.append({"role": spoken, "content": FILLER})
                made.append(message)
            before = "" if kind in INSTRUCTIONS else kind_of(made[-1])
            spoken = before if before in ("user", "assistant") else spoken
        return made

    @property
    def alternate(self) -> bool:
        """Whether some turns can't follow each other."""
        return any(self._parts(*shapes) for shapes in (*_MERGED.values(), *_PARTED.values()))

    def _parts(self, given: Sequence[str], made: Sequence[str], *, tools: bool = False) -> bool:
        """Checks that a conversation is not shown as it is given, but is as it can be made."""
        return not self._probe.shows(*given, tools=tools) and self._probe.shows(*made, tools=tools)

    def filled(self, messages: Iterable[Message]) -> list[Message]:
        """Returns the messages with a content where the template refuses an empty one."""
        return [{**message, "content": EMPTY} if self._is_refused(message) else message for message in messages]

    def _is_refused(self, message: Message) -> bool:
        is_empty = not (message.get("tool_calls") or text_of(message).strip())
        return is_empty and self.refuses_empty(str(message["role"]))

    def refuses_empty(self, role: str) -> bool:
        """Whether a message of this role must have a content."""
        if role not in self._refuses_empty:
            kinds = _SPOKEN.get(role, (role, "user"))
            emptied = conversation(kinds)
            emptied[kinds.index(role)]["content"] = ""
            self._refuses_empty[role] = self._probe.shows(*kinds) and self._probe.text(emptied) is None
        return self._refuses_empty[role]


def _merged(first: Message, second: Message) -> Message:
    texts = [text for text in (text_of(first), text_of(second)) if text]
    reasoning = [message["reasoning"] for message in (first, second) if message.get("reasoning")]
    made: dict[str, Any] = {**first, **second, "content": "\n\n".join(texts)}
    return {**made, "reasoning": "\n\n".join(reasoning)} if reasoning else made

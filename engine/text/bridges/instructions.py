"""Keeps system and developer messages in the prompt where a template refuses or loses them.

A run of them that the template does not show as it stands becomes one message. If even that is not shown at its place,
it becomes a user turn there, marked by a tag with the role's name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

from penstock.engine.text.bridges.probe import Message, Probe, kind_of

INSTRUCTIONS = ("system", "developer")

_BEFORE: dict[str, tuple[str, ...]] = {
    "": (),
    "user": ("user",),
    "assistant": ("user", "assistant"),
    "call": ("user", "call"),
    "tool": ("user", "call", "tool"),
}
_AFTER: dict[str, tuple[str, ...]] = {
    "": (),
    "user": ("user",),
    "assistant": ("assistant", "user"),
    "call": ("call", "tool"),
    "tool": ("tool",),
}
_FROM_USER = {**_BEFORE, "": ("user",)}


def text_of(message: Message) -> str:
    """Returns the content as one text."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


class Instructions:
    """Where one template shows system and developer messages."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def leads(self, roles: Sequence[str], after: str = "user", last: str = "user", *, tools: bool = False) -> bool:
        """Checks whether instructions of these roles are shown, and hide nothing, in front of a conversation.

        Args:
            roles: of the instructions.
            after: kind of the message after them, `""` if there is none.
            last: kind of the last message: some templates show the instructions beside it.
            tools: whether there are tools.
        """
        follows = _FROM_USER[last] if after == "user" else _AFTER[after]
        is_usual = self._probe.shown(follows, tools=tools) is not None
        return self._keeps((), roles, follows if is_usual or after != "user" else ("user",), tools=tools)

    def takes(self, roles: Sequence[str], before: str, after: str, *, lead: str = "", tools: bool = False) -> bool:
        """Checks whether instructions of these roles are shown, and hide nothing, between two messages.

        Args:
            roles: of the instructions.
            before: kind of the message before.
            after: kind of the message after, `""` if they come last.
            lead: role of an instruction in front of all, if there is one.
            tools: whether there are tools.
        """
        first = (lead, *_BEFORE[before]) if lead else _BEFORE[before]
        return self._keeps(first, roles, _AFTER[after], tools=tools)

    def _keeps(self, before: Sequence[str], roles: Sequence[str], after: Sequence[str], *, tools: bool) -> bool:
        runs = [tuple(roles)] if len(roles) <= 2 else sorted(set(itertools.pairwise(roles)))
        return all(self._probe.keeps(before, run, after, tools=tools) for run in runs)

    def can_follow(self, before: str, after: str) -> bool:
        """Checks whether two messages may follow each other at all."""
        return self._probe.shows(*_BEFORE[before], *_AFTER[after])

    def placed(self, messages: Sequence[Message], *, tools: bool) -> list[Message]:
        """Returns the messages with each instruction where, and as what, the template shows it."""
        made: list[Message] = []
        lead, last = "", "user" if _instructs(messages[-1]) else kind_of(messages[-1])
        groups = [(is_run, list(group)) for is_run, group in itertools.groupby(messages, _instructs)]
        for (is_run, run), (_, rest) in itertools.pairwise([*groups, (False, [])]):
            if not is_run:
                made += run
                continue
            after = kind_of(rest[0]) if rest else ""
            if made:
                takes = partial(self.takes, before=kind_of(made[-1]), after=after, lead=lead, tools=tools)
            else:
                takes = partial(self.leads, after=after, last=last, tools=tools)
            kept = _shown(run, takes)
            lead = lead if made or not _instructs(kept[0]) else str(kept[0]["role"])
            made += kept
        return made


def _shown(run: Sequence[Message], takes: Callable[[Sequence[str]], bool]) -> Sequence[Message]:
    """Returns the run as it stands, as one message, or as a marked turn: the first of them that the template shows."""
    roles = [str(message["role"]) for message in run]
    if takes(roles):
        return run
    for role in dict.fromkeys(roles):
        if len(run) > 1 and takes([role]):
            return [{"role": role, "content": "\n\n".join(map(text_of, run))}]
    return [_as_turn(run)]


def _instructs(message: Message) -> bool:
    return message["role"] in INSTRUCTIONS


def _as_turn(run: Sequence[Message]) -> Message:
    marked = (f"<{message['role']}>\n{text_of(message)}\n</{message['role']}>" for message in run)
    return {"role": "user", "content": "\n\n".join(marked)}

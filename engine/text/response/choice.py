"""The format of a model's replies, and the part of a reply that its prompt already holds."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.response.syntax import ReplyFormat, TurnMarks

MAX_PREFIX_TAGS = 256
NO_MARKS = TurnMarks()
AUTO, NONE = "auto", "none"  # values of the setting that name no format


def named_in(template: str) -> list[str]:
    """Returns the formats whose marks a chat template has, special cases first."""
    return [format_.name for format_ in FORMATS.values() if format_.marks and _has(template, format_.marks)]


def why_no_format(setting: str) -> str | None:
    """Returns what the setting `chat_format` must be, or None if it is that."""
    if setting in (AUTO, NONE) or setting in FORMATS:
        return None
    return f"must be {AUTO}, {NONE} or one of {', '.join(FORMATS)}"


def reply_prefix(format_name: str, prompt: str, turn: TurnMarks = NO_MARKS) -> str:
    """Returns the part of the reply that a prompt already has: the text after the last anchor, such as `<think>`.

    A prompt that ends with somebody else's turn contains nothing of the reply. `turn` has the template's own marks.

    Raises:
        InvalidRequest: it has more tags than the engine's thread has time for.
    """
    format_ = FORMATS[format_name]
    found = [(prompt.rfind(anchor), len(anchor)) for anchor in (*format_.turn.anchors, *turn.anchors)]
    place, length = max(found, default=(-1, 0))
    if place < 0:
        return _open_reasoning(format_, prompt)
    prefix = prompt[place + length :]
    if any(end and end in prefix for end in (format_.turn.end, turn.end)):
        return ""
    num_tags = sum(map(prefix.count, format_.delimiters))
    if num_tags > MAX_PREFIX_TAGS:
        raise InvalidRequest(f"the message that is continued has {num_tags} tags, the limit is {MAX_PREFIX_TAGS}")
    return prefix


def shows_reasoning(format_name: str, template: str) -> bool:
    """Whether a chat template of this format has a reasoning tag: not all models that use the format reason."""
    reasoning = FORMATS[format_name].reasoning
    return reasoning is not None and any(tag.strip() in template for tag in (reasoning.begin, reasoning.end))


def _open_reasoning(format_: ReplyFormat, prompt: str) -> str:
    """Returns the reasoning tag at the end of a prompt that has none of the anchors."""
    begin = format_.reasoning.begin.strip() if format_.reasoning else ""
    return begin if begin and prompt.rstrip().endswith(begin) else ""


def _has(template: str, marks: Iterable[str]) -> bool:
    return all(mark in template for mark in marks)

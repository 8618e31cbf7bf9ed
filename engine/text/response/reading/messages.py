"""Replies that are a sequence of messages, each with a header that says what it is, as in gpt-oss."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.engine.text.response.reading.source import Reading, TextCursor
from penstock.engine.text.response.syntax import ReplyFormat

MAX_HEADER_CHARS = 512

_RECIPIENT = re.compile("to=([^\\s\ud800-\udfff<]+)")


@dataclass(frozen=True, slots=True)
class MessageHeader:
    is_reasoning: bool
    recipient: str  # the called function; empty: none


@dataclass(frozen=True, slots=True)
class Framing:
    """The delimiters around messages, taken from a format of messages."""

    begins: tuple[str, ...]  # of a header
    end_of_header: str
    ends: tuple[str, ...]  # of a message
    reasoning_channel: str
    function: str  # prefix of a call's recipient


def framing(format_: ReplyFormat) -> Framing | None:
    if not format_.has_messages or format_.reasoning is None:
        return None
    channel, _, end_of_header = format_.pieces(format_.text_begin)
    return Framing(
        begins=(format_.pieces(format_.next_part)[0], channel),
        end_of_header=end_of_header,
        ends=(format_.text_end, format_.calls.end, format_.turn.end),
        reasoning_channel=format_.pieces(format_.reasoning.begin)[1],
        function=format_.calls.begin.rpartition("to=")[2],
    )


def read_header(source: TextCursor, frame: Framing) -> Reading[MessageHeader]:
    """Reads a header. Raises Malformed if none ends within its maximum length."""
    text = yield from source.until(frame.end_of_header, MAX_HEADER_CHARS)
    yield from source.expect(frame.end_of_header)
    recipient = _RECIPIENT.search(text)
    function = recipient[1] if recipient else ""
    return MessageHeader(frame.reasoning_channel in text, function.removeprefix(frame.function))

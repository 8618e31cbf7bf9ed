"""Splits a reply, as it arrives, into text, reasoning and tool calls.

`ResponseParser` of transformers finds the tags, and holds back what could still become one. Each kind of part has a
template of its own, since other tags count there. What follows the tag of a call is read by our own readings: they pass
arguments on before these are complete, and what turns out not to be a call becomes text again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from penstock.engine.request import ResponseSpec
from penstock.engine.text.response.flaws import Flaw
from penstock.engine.text.response.reading.calls import CallReader
from penstock.engine.text.response.reading.delta import Collector, Delta, ReplyEnd
from penstock.engine.text.response.reading.dialect import Dialect
from penstock.engine.text.response.reading.messages import Framing, read_header
from penstock.engine.text.response.reading.modes import (
    AT_START,
    CALLS,
    HEADER,
    PART,
    REASONING,
    UNMARKED_CALLS,
    UNOPENED_CALLS,
    Mode,
    Modes,
)
from penstock.engine.text.response.reading.source import Malformed, Reading, TextCursor

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser

PIECE_CHARS = 4096  # of a prompt: everything after a tag is copied with each tag
MAX_CUT_OFF = 64  # unfinished calls that turn out to be none: the text after each is scanned again, to its end


class ReplyParser:
    """The parts of one growing reply.

    All pushes and the end joined are the reply, however its text was cut. What has come out after some text depends on
    that text and on how it was cut, so text must always be pushed token by token.
    """

    def __init__(
        self,
        dialect: Dialect,
        modes: Modes,
        spec: ResponseSpec,
        call_id: Callable[[int], str],
        *,
        shows_special: bool,
        flaws: Collection[Flaw] = frozenset(),
    ) -> None:
        self._collector = Collector(call_id, dialect.spelled if shows_special else {})
        self._calls = CallReader(dialect.format.calls, spec.tools, self._collector, flaws)
        self._has_tools = bool(spec.tools)
        self._modes = modes
        self._mode = modes.start
        self._scanner: ResponseParser | None = None  # set while text is held back that could become a tag
        self._held = ""  # what the scanner has not passed on
        self._reading: Reading[Mode] | None = None  # of what follows a tag
        self._source = TextCursor("")
        self._tag = ""
        self._num_calls = 0  # when the reading began; -1: it has begun calls in the prompt
        self._is_behind_header = False
        self._is_marked = False  # whether a tag marks what is read as a call, or as part of a message's header
        self._ended = ReplyEnd.ITSELF
        self._num_cut_off = 0  # unfinished calls at the reply's end that turned out to be none
        if spec.prefix:
            self._take_prefix(dialect.written(spec.prefix))

    def _take_prefix(self, text: str) -> None:
        for place in range(0, len(text), PIECE_CHARS):
            self._run(text[place : place + PIECE_CHARS])
        if self._scanner is not None and self._held.strip():
            self._scan("", is_last=True)  # a tag at the end of the prompt counts, whatever follows
        self._scanner = None
        has_begun = self._collector.num_calls > self._num_calls
        self._collector.forget()
        self._num_calls = -1 if has_begun else 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._mode.is_reasoning

    @property
    def calls_tools(self) -> bool:
        """Whether a call is complete."""
        return self._collector.num_complete > 0

    @property
    def num_mended(self) -> int:
        """Number of calls whose flaw was fixed."""
        return self._collector.num_mended

    def push(self, text: str) -> Delta:
        """Returns what this text released."""
        self._run(text)
        return self._collector.take()

    def finish(self, text: str = "", ended: ReplyEnd = ReplyEnd.ITSELF) -> Delta:
        """Returns what the last text released, and everything held back. Nothing may be pushed afterwards.

        What the model did not end itself is not text: a call whose name has been read is a call, and what may only
        become one is dropped.
        """
        self._ended = ended
        self._run(text, is_last=True)
        self._collector.last_space(is_reasoning=self._mode.is_reasoning)
        return self._collector.take()

    def _run(self, text: str, *, is_last: bool = False) -> None:
        rest: str | None = text
        while rest is not None:
            reading = self._reading
            rest = self._scan(rest, is_last) if reading is None else self._read(reading, rest, is_last)

    def _scan(self, text: str, is_last: bool) -> str | None:
        """Looks for a tag; returns the text to look at next, or None."""
        scanner = self._scanner
        if scanner is None:
            if self._mode is self._modes.start and self._mode.scanner is not None:
                text = self._without_space(text)
            new_scanner, start = self._mode.scanner, self._mode.first_place(text)
            if new_scanner is None or start < 0 or not text:
                self._emit(text)
                return None
            self._emit(text[:start])
            text = text[start:]
            self._scanner = scanner = new_scanner()
            self._held = ""
        self._held += text
        events = scanner.feed(text)
        if is_last:
            last = scanner.finalize()[1]
            if self._ended is ReplyEnd.CUT and _is_part_of_tag([*events, *last], last):
                self._collector.border()
            else:
                events += last
        tag, rest = "", ""
        for event in events:
            if event["type"] == "region_open" and event["field"] != PART:
                tag = event["field"]
            elif event["type"] == "region_chunk" and tag:
                rest += event["text"]
            elif event["type"] == "region_chunk":
                self._held = self._held[len(event["text"]) :]
                self._emit(event["text"])
        if tag:
            self._scanner = None
            return self._enter(tag.removesuffix(AT_START), rest)
        if is_last or not self._held:
            self._scanner = None
        return None

    def _without_space(self, text: str) -> str:
        """Returns the beginning of a reply without white space: a tag that counts only there may still follow."""
        rest = text.lstrip()
        if not self._modes.skips_space:
            self._collector.text(text[: len(text) - len(rest)])
        return rest

    def _enter(self, begun: str, rest: str) -> str:
        """Handles a tag that was found; `rest` is the text after it."""
        if begun in (CALLS, UNMARKED_CALLS, UNOPENED_CALLS, HEADER):
            self._tag = self._held.removesuffix(rest) if rest else self._held
            self._source = TextCursor(self._tag)
            self._num_calls = self._collector.num_calls
            self._is_behind_header = False
            self._is_marked = begun == CALLS
            frame = self._modes.frame
            if begun == UNOPENED_CALLS:
                self._reading = self._read_unopened()
            else:
                self._reading = self._read_calls(begun == CALLS) if frame is None else self._read_message(frame)
        else:
            self._mode = self._modes.reasoning if begun == REASONING else self._modes.text
            self._collector.border()
        return rest

    def _read(self, reading: Reading[Mode], text: str, is_last: bool) -> str | None:
        """Reads on after a tag; returns the text after what it began, or None if that has not ended."""
        self._source.push(text)
        if is_last:
            self._source.end(is_whole=self._ended is ReplyEnd.ITSELF)
        try:
            next(reading)
        except StopIteration as end:
            self._mode, rest = end.value, self._source.rest()
            self._collector.border()
        except Malformed:
            self._mode, rest = self._modes.text, self._given_back(is_last)
        else:
            return None
        self._reading = None
        return rest

    def _given_back(self, is_last: bool) -> str:
        """Returns the text to look at again. A call that has begun keeps what it has; a cut off one ends there."""
        if self._source.is_cut_off and self._ended is not ReplyEnd.ITSELF:
            self._calls.begin_announced(self._source)
        if self._collector.num_calls > self._num_calls:
            self._collector.border()
            return "" if self._source.is_cut_off else self._source.unsettled()
        if self._is_behind_header:
            self._collector.border()
            return self._source.unsettled()
        if is_last and (self._is_in_header() or self._is_cut_call()):
            self._collector.border()
            return ""
        self._collector.text(self._tag)
        rest = self._source.text[len(self._tag) :]
        self._num_cut_off += is_last
        if self._num_cut_off > MAX_CUT_OFF:
            self._collector.text(rest)
            return ""
        return rest

    def _is_in_header(self) -> bool:
        """Whether what was begun can only be a header: text may look like the form that has no tag."""
        frame = self._modes.frame
        if frame is None:
            return False
        is_cut = self._ended is not ReplyEnd.ITSELF and frame.function.startswith(self._source.text[len(self._tag) :])
        return self._tag in frame.begins or frame.function in self._source.text or is_cut

    def _is_cut_call(self) -> bool:
        """Whether something but the model ended the reply in a call, before the end of its name."""
        if self._ended is ReplyEnd.ITSELF or not self._source.is_cut_off or self._modes.frame is not None:
            return False
        return self._is_marked or self._calls.names_a_tool(self._source.text)

    def _read_calls(self, is_marked: bool) -> Reading[Mode]:
        tag = self._tag.strip() if is_marked else ""
        yield from self._calls.read(self._source, is_marked=is_marked, tag=tag)
        return self._modes.text

    def _read_unopened(self) -> Reading[Mode]:
        yield from self._calls.read_unopened(self._source)
        return self._modes.text

    def _read_message(self, frame: Framing) -> Reading[Mode]:
        header = yield from read_header(self._source, frame)
        self._source.settle()
        self._is_behind_header = True
        if header.recipient and self._has_tools:
            yield from self._calls.read_arguments(self._source, header.recipient)
            return self._modes.text
        return self._modes.reasoning if header.is_reasoning else self._modes.text

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._mode.is_reasoning:
            self._collector.reasoning(text)
            return
        if self._mode is self._modes.start:
            self._mode = self._modes.text
        self._collector.text(text, is_last_part=self._mode.scanner is None)


def _is_part_of_tag(events: list[dict[str, Any]], last: list[dict[str, Any]]) -> bool:
    """Whether `last`, the end of `events`, is an unfinished tag; one character is too common to count."""
    has_tag = any(event["type"] == "region_open" and event["field"] != PART for event in events)
    held = "".join(event["text"] for event in last if event["type"] == "region_chunk")
    return not has_tag and len(held.strip()) > 1

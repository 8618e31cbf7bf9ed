"""Entries become chunks: nothing twice, nothing missing, whoever wrote them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.producer.reading.assembly import Assembler
from penstock.protocol.errors import ReplyCorrupt, RequestFailed, RequestRefused
from penstock.protocol.reply import Chunk, Prefill, ToolCall
from penstock.protocol.wire import ChunkEntry, EndEntry, OwnEntry, TokenLogprob, ToolCallDelta


def chunk(offset: int, text: str, *, tokens: int | None = None, index: int = 0) -> ChunkEntry:
    """Makes a chunk whose token ids are their own offsets."""
    count = len(text) if tokens is None else tokens
    return ChunkEntry(index=index, offset=offset, text=text, tokens=tuple(range(offset, offset + count)))


def feed(assembler: Assembler, *entries: OwnEntry | ChunkEntry | EndEntry) -> list[tuple[int, str, tuple[int, ...]]]:
    """Feeds entries; returns offset, text and tokens of the chunks that came out."""
    chunks = [assembler.feed(f"1-{number}", entry) for number, entry in enumerate(entries)]
    return [(item.offset, item.text, item.tokens) for item in chunks if item is not None]


def test_chunks_pass_and_add_up() -> None:
    assembler = Assembler("r")
    own = OwnEntry(worker="w", epoch=1)
    assert feed(assembler, own, chunk(0, "ab"), chunk(2, "c")) == [(0, "ab", (0, 1)), (2, "c", (2,))]
    assert not assembler.ended
    end = EndEntry(finish_reason="length", prompt_tokens=4, cached_tokens=2, completion_tokens=3, total_ms=9)
    assert feed(assembler, end) == []
    reply = assembler.reply
    assert reply is not None
    assert (reply.text, reply.tokens, reply.finish_reason) == ("abc", (0, 1, 2), "length")
    assert (reply.usage.prompt_tokens, reply.usage.cached_tokens, reply.timings.total_ms) == (4, 2, 9)


def prefill_of(assembler: Assembler) -> Prefill | None:
    return assembler.prefill


def test_how_far_the_prompt_is_is_no_part_of_the_reply() -> None:
    told: list[tuple[int, int]] = []
    assembler = Assembler("r")
    assembler.tell_prefill = lambda prefill: told.append((prefill.done, prefill.total))
    own = [OwnEntry(worker=f"w{turn}", epoch=turn) for turn in range(3)]
    far = [chunk(0, "").model_copy(update={"prefill_done": done, "prefill_total": 90}) for done in (16, 48)]
    assert feed(assembler, own[0], *far) == []
    assert prefill_of(assembler) == Prefill(48, 90)
    assert feed(assembler, own[1]) == []
    assert prefill_of(assembler) is None
    assert feed(assembler, far[0], chunk(0, "ab"), own[2]) == [(0, "ab", (0, 1))]
    later = chunk(2, "").model_copy(update={"prefill_done": 91, "prefill_total": 92})
    assert feed(assembler, later, chunk(2, "c"), EndEntry(finish_reason="stop", completion_tokens=3)) == [
        (2, "c", (2,))
    ]
    assert prefill_of(assembler) is None
    assert told == [(16, 90), (48, 90), (16, 90), (91, 92)]


def test_a_gap_is_never_hidden() -> None:
    with pytest.raises(ReplyCorrupt, match=r"entry 1-1: .*token 3, but only 2 came before"):
        feed(Assembler("r"), chunk(0, "ab"), chunk(3, "d"))


def test_a_missing_tail_is_never_hidden() -> None:
    with pytest.raises(ReplyCorrupt, match="2 tokens were read, the end entry counts 3"):
        feed(Assembler("r"), chunk(0, "ab"), EndEntry(finish_reason="stop", completion_tokens=3))


def test_tokens_that_were_read_are_dropped() -> None:
    assembler = Assembler("r")
    chunks = feed(assembler, chunk(0, "ab"), chunk(2, "cd"), OwnEntry(worker="w2", epoch=2), chunk(2, "cdef"))
    assert chunks == [(0, "ab", (0, 1)), (2, "cd", (2, 3)), (4, "ef", (4, 5))]


def test_going_back_to_the_middle_of_a_chunk_is_an_error() -> None:
    with pytest.raises(ReplyCorrupt, match="goes back to token 1, where no chunk ended"):
        feed(Assembler("r"), chunk(0, "ab"), chunk(1, "b"))


def test_logprobs_are_cut_with_their_tokens() -> None:
    logprobs = [TokenLogprob(id=place, token="a", bytes=b"a", logprob=-float(place), top=()) for place in range(3)]
    assembler = Assembler("r")
    assembler.feed("1-1", chunk(0, "ab").model_copy(update={"logprobs": tuple(logprobs[:2])}))
    last = assembler.feed("2-1", chunk(0, "abc").model_copy(update={"logprobs": tuple(logprobs)}))
    assert last is not None
    assert (last.tokens, last.logprobs) == ((2,), tuple(logprobs[2:]))
    assembler.feed("2-2", EndEntry(finish_reason="stop", completion_tokens=3))
    assert assembler.reply is not None
    assert assembler.reply.choices[0].logprobs == tuple(logprobs)


def test_choices_are_kept_apart() -> None:
    assembler = Assembler("r")
    feed(assembler, chunk(0, "ab"), chunk(0, "x", index=2), chunk(2, "c"), chunk(1, "y", index=2))
    feed(assembler, EndEntry(finish_reason="length", finish_reasons=("stop", "stop", "length"), completion_tokens=5))
    assert assembler.reply is not None
    choices = [(choice.index, choice.text, choice.finish_reason) for choice in assembler.reply.choices]
    assert choices == [(0, "abc", "stop"), (1, "", "stop"), (2, "xy", "length")]


def test_the_end_of_a_choice_is_told_once() -> None:
    assembler = Assembler("r")
    last = chunk(2, "").model_copy(update={"finish_reason": "stop"})
    chunks = [assembler.feed("1-1", chunk(0, "ab")), assembler.feed("1-2", last), assembler.feed("2-1", last)]
    assert [item and (item.text, item.finish_reason) for item in chunks] == [("ab", None), ("", "stop"), None]


def call(index: int, arguments: str, id_: str | None = None) -> ToolCallDelta:
    return ToolCallDelta(index=index, arguments=arguments, id=id_, name=None if id_ is None else f"name of {id_}")


def with_calls(entry: ChunkEntry, *calls: ToolCallDelta, reasoning: str = "") -> ChunkEntry:
    return entry.model_copy(update={"tool_calls": calls, "reasoning": reasoning})


def test_reasoning_and_calls_add_up_apart_from_the_text() -> None:
    assembler = Assembler("r")
    entries = [
        with_calls(chunk(0, "", tokens=2), reasoning="hm"),
        with_calls(chunk(2, "a"), call(0, '{"x"', "c0"), reasoning="."),
        with_calls(chunk(3, "", tokens=1), call(0, ": 1}"), call(1, "{}", "c1")),
    ]
    chunks = [assembler.feed(f"1-{number}", entry) for number, entry in enumerate(entries)]
    assert [item and (item.reasoning, item.tool_calls) for item in chunks] == [
        (entry.reasoning, entry.tool_calls) for entry in entries
    ]
    assembler.feed("1-4", EndEntry(finish_reason="tool_calls", completion_tokens=4, stop_token_id=9))
    reply = assembler.reply
    assert reply is not None
    assert (reply.text, reply.reasoning, reply.finish_reason) == ("a", "hm.", "tool_calls")
    assert reply.tool_calls == (ToolCall("c0", "name of c0", '{"x": 1}'), ToolCall("c1", "name of c1", "{}"))
    assert reply.choices[0].stop_reason == 9


def test_of_arguments_that_were_read_none_comes_again() -> None:
    assembler = Assembler("r")
    assembler.feed("1-1", with_calls(chunk(0, "", tokens=1), call(0, '{"a', "c0"), reasoning="x"))
    assembler.feed("1-2", with_calls(chunk(1, "", tokens=1), call(0, "b"), call(0, "c")))
    again = with_calls(chunk(0, "", tokens=3), call(0, '{"abcd"', "c0"), call(1, "{", "c1"), reasoning="xy")
    new = assembler.feed("2-1", again)
    assert new is not None
    assert (new.offset, new.tokens, new.reasoning) == (2, (2,), "y")
    assert new.tool_calls == (call(0, 'd"'), call(1, "{", "c1"))


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([call(0, "{")], "continues call 0, 0 calls came before"),
        ([call(1, "{", "c1")], "begins call 1, 0 calls came before"),
        ([call(0, "{", "c0"), call(0, "{", "c0")], "begins call 0, 1 calls came before"),
        ([call(0, "{", "c0"), call(1, "}")], "continues call 1, 1 calls came before"),
    ],
)
def test_a_call_without_its_beginning_is_never_hidden(calls: list[ToolCallDelta], told: str) -> None:
    with pytest.raises(ReplyCorrupt, match=f"entry 1-0: choice 0 {told}"):
        feed(Assembler("r"), with_calls(chunk(0, "a"), *calls))


def test_of_several_choices_each_last_chunk_says_what_stopped_it() -> None:
    assembler = Assembler("r")
    stops: list[dict[str, Any]] = [{"stop_string": "END"}, {"stop_token_id": 0}, {}]
    for index, stop in enumerate(stops):
        last = chunk(0, "a", index=index).model_copy(update={"finish_reason": "stop", **stop})
        item = assembler.feed(f"1-{index}", last)
        assert item is not None
        assert item.stop_reason == next(iter(stop.values()), None)
    assembler.feed("1-3", EndEntry(finish_reason="stop", finish_reasons=("stop",) * 3, completion_tokens=3))
    assert assembler.reply is not None
    assert [choice.stop_reason for choice in assembler.reply.choices] == ["END", 0, None]


def test_nothing_follows_the_last_chunk_of_a_choice() -> None:
    """Text that was held back comes without tokens, so that its offset alone does not tell that it was read."""
    assembler = Assembler("r")
    last = chunk(2, "!", tokens=0).model_copy(update={"finish_reason": "error"})
    assert [item and item.text for item in (assembler.feed("1-1", chunk(0, "ab")), assembler.feed("1-2", last))] == [
        "ab",
        "!",
    ]
    assert assembler.feed("2-1", last) is None


def test_the_prompt_s_logprobs_come_once() -> None:
    logprobs = (None, TokenLogprob(id=7, token="x", bytes=b"x", logprob=-1.0, top=()))
    assembler = Assembler("r")
    first = chunk(0, "a").model_copy(update={"prompt_logprobs": logprobs})
    items = [assembler.feed("1-1", first), assembler.feed("1-2", chunk(1, "b")), assembler.feed("2-1", first)]
    assert [item and item.prompt_logprobs for item in items] == [logprobs, None, None]
    assembler.feed("2-2", EndEntry(finish_reason="stop", completion_tokens=2))
    assert assembler.reply is not None
    assert assembler.reply.prompt_logprobs == logprobs


@pytest.mark.parametrize("reason", ["cancelled", "expired"])
def test_a_reply_that_was_stopped_is_a_reply(reason: str) -> None:
    assembler = Assembler("r")
    feed(assembler, chunk(0, "a"), EndEntry.model_validate({"finish_reason": reason, "completion_tokens": 1}))
    assert assembler.reply is not None
    assert (assembler.reply.text, assembler.reply.finish_reason) == ("a", reason)


def test_errors_are_told_apart_by_their_code() -> None:
    assembler = Assembler("r")
    with pytest.raises(RequestRefused, match="too_long: 9 tokens") as refused:
        feed(assembler, EndEntry(finish_reason="error", code="too_long", message="9 tokens"))
    assert (refused.value.request_id, refused.value.code, assembler.ended) == ("r", "too_long", True)
    with pytest.raises(RequestFailed, match="engine_error: broke") as failed:
        feed(Assembler("r"), chunk(0, "ab"), EndEntry(finish_reason="error", code="engine_error", message="broke"))
    assert failed.value.reply.text == "ab"


class Story:
    """A choice whose tokens each stand for some characters of text or reasoning, or of a call's arguments."""

    def __init__(self, parts: list[tuple[str, str]]) -> None:
        self.parts = parts

    def chunk(self, start: int, stop: int) -> ChunkEntry:
        """Makes the chunk of tokens [start, stop) as a worker does that knows the ones before."""
        num_calls = sum(what == "begin" for what, _ in self.parts[:start])
        said: dict[str, str] = {"text": "", "reasoning": ""}
        deltas: list[ToolCallDelta] = []
        for what, part in self.parts[start:stop]:
            if what in said:
                said[what] += part
                continue
            num_calls += what == "begin"
            id_ = f"c{num_calls - 1}" if what == "begin" else None
            if id_ is None and deltas and deltas[-1].index == num_calls - 1:
                deltas[-1] = deltas[-1].model_copy(update={"arguments": deltas[-1].arguments + part})
            else:
                deltas.append(call(num_calls - 1, part, id_))
        text, reasoning = said["text"], said["reasoning"]
        return with_calls(chunk(start, text, tokens=stop - start), *deltas, reasoning=reasoning)

    def whole(self) -> tuple[str, str, list[tuple[str, str]]]:
        calls: list[list[str]] = []
        for what, part in self.parts:
            if what == "begin":
                calls.append([])
            if what in ("begin", "call"):
                calls[-1].append(part)
        joined = {kind: "".join(part for what, part in self.parts if what == kind) for kind in ("text", "reasoning")}
        named = [(f"c{at}", "".join(parts)) for at, parts in enumerate(calls)]
        return joined["text"], joined["reasoning"], named


@st.composite
def stories(draw: st.DrawFn) -> Story:
    parts: list[tuple[str, str]] = []
    for _ in range(draw(st.integers(1, 10))):
        has_call = any(what == "begin" for what, _ in parts)
        what = draw(st.sampled_from(["text", "reasoning", "begin", *(["call"] if has_call else [])]))
        parts.append((what, draw(st.text("abcdefgh", max_size=3))))
    return Story(parts)


@given(story=stories(), data=st.data())
def test_whatever_is_repeated_after_a_failover_each_token_comes_once(story: Story, data: st.DataObject) -> None:
    """Writers take over at the end of some earlier chunk and cut what follows as they like; texts lag behind tokens."""
    num_tokens = len(story.parts)
    assembler, at = Assembler("r"), 0
    got: list[Chunk] = []
    written = {0}
    while at < num_tokens:
        to = data.draw(st.integers(at + 1, num_tokens))
        item = assembler.feed("1-1", story.chunk(at, to))
        got += [] if item is None else [item]
        at = data.draw(st.sampled_from([*sorted(written), to])) if to < num_tokens else to
        written = {place for place in {*written, to} if place <= at}  # what the server still had
    text, reasoning, calls = story.whole()
    assert [token for item in got for token in item.tokens] == list(range(num_tokens))
    assert [item.offset for item in got] == [item.tokens[0] for item in got]
    assert "".join(item.text for item in got) == text
    assert "".join(item.reasoning for item in got) == reasoning
    assembler.feed("1-1", EndEntry(finish_reason="length", completion_tokens=num_tokens))
    assert assembler.reply is not None
    assert (assembler.reply.text, assembler.reply.reasoning) == (text, reasoning)
    assert [(each.id, each.arguments) for each in assembler.reply.tool_calls] == calls
    deltas = [delta for item in got for delta in item.tool_calls]
    assert [delta.id for delta in deltas if delta.id is not None] == [id_ for id_, _ in calls]
    for index, (_, arguments) in enumerate(calls):
        assert "".join(delta.arguments for delta in deltas if delta.index == index) == arguments

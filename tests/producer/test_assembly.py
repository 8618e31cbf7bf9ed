"""From entries to chunks: nothing twice, nothing missing, whoever wrote them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.producer.errors import ReplyCorrupt, RequestFailed, RequestRefused
from penstock.producer.reading.assembly import Assembler
from penstock.producer.wire import ChunkEntry, EndEntry, OwnEntry, TokenLogprob


def chunk(offset: int, text: str, *, tokens: int | None = None, index: int = 0) -> ChunkEntry:
    """A chunk whose token ids are their own places."""
    count = len(text) if tokens is None else tokens
    return ChunkEntry(index=index, offset=offset, text=text, tokens=tuple(range(offset, offset + count)))


def feed(assembler: Assembler, *entries: OwnEntry | ChunkEntry | EndEntry) -> list[tuple[int, str, tuple[int, ...]]]:
    """Feeds entries; returns offset, text and tokens of the chunks that came out."""
    chunks = [assembler.feed(f"1-{number}", entry) for number, entry in enumerate(entries)]
    return [(item.offset, item.text, item.tokens) for item in chunks if item is not None]


def test_chunks_pass_and_add_up() -> None:
    assembler = Assembler("r")
    entries = [OwnEntry(worker="w", epoch=1), chunk(0, "ab"), chunk(2, "c")]
    assert feed(assembler, *entries) == [(0, "ab", (0, 1)), (2, "c", (2,))]
    assert not assembler.ended
    end = EndEntry(finish_reason="length", prompt_tokens=4, cached_tokens=2, completion_tokens=3, total_ms=9)
    assert feed(assembler, end) == []
    reply = assembler.reply
    assert reply is not None
    assert (reply.text, reply.tokens, reply.finish_reason) == ("abc", (0, 1, 2), "length")
    assert (reply.usage.prompt_tokens, reply.usage.cached_tokens, reply.timings.total_ms) == (4, 2, 9)


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


@given(st.data())
def test_whatever_is_repeated_after_a_failover_each_token_comes_once(data: st.DataObject) -> None:
    """Writers take over at the end of some earlier chunk and cut what follows as they like; texts lag behind tokens."""
    num_tokens = data.draw(st.integers(1, 8))
    ends = [0] * (num_tokens + 1)  # characters known after so many tokens
    for place in range(1, num_tokens + 1):
        ends[place] = ends[place - 1] + data.draw(st.integers(0, 3))
    text = "".join(chr(ord("a") + place % 26) for place in range(ends[-1]))

    assembler, got, at = Assembler("r"), [], 0
    written = {0}
    while at < num_tokens:
        to = data.draw(st.integers(at + 1, num_tokens))
        got += feed(assembler, chunk(at, text[ends[at] : ends[to]], tokens=to - at))
        at = data.draw(st.sampled_from([*sorted(written), to])) if to < num_tokens else to
        written = {place for place in {*written, to} if place <= at}  # what the server still had
    assert "".join(item[1] for item in got) == text
    assert [token for item in got for token in item[2]] == list(range(num_tokens))
    assert [item[0] for item in got] == [item[2][0] for item in got]
